"""Adapters that are served beside their base, each a model by its name, in a place of its own.

A place is given to another adapter once the last stream of the one before has ended; those who ask
for one that was unloaded are refused from then on.
"""

import asyncio
import dataclasses
import itertools
from pathlib import Path

from spmd.serving.engine.actions import Job
from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.fields import show
from spmd.serving.http.language import Loaded

LONGEST_NAME = 256


@dataclasses.dataclass(eq=False)
class Adapter:
    """One that was loaded, perhaps under a name that another one had before; or none at all."""

    name: str
    place: int  # -1: it is none
    serial: int  # of all that were ever loaded, from 1; of none 0
    streams: int = 0  # requests that use it

    def adapted(self, job: Job) -> Job:
        """A job that is run with it; pages are shared with those alone that are, too."""
        return dataclasses.replace(job, adapter=self.place, salt=f"{self.serial} {job.salt}")


class Adapters:
    """The adapters of a model; for the thread of the event loop alone, but for `names`.

    Args:
      loaded: has those that are there from the start.
      root: the folder below which others may be loaded; None: no others are.
    """

    def __init__(self, loaded: Loaded, root: str | None = None) -> None:
        language = loaded.language
        self._put = loaded.adapt
        self._count = 0 if language is None else language.limits.adapters
        self._root = None if root is None else Path(root).resolve()
        self._serials, self._loading = itertools.count(1), asyncio.Lock()
        self._none = Adapter(loaded.name, -1, 0)
        self._every = [Adapter(n, i, next(self._serials)) for i, n in enumerate(loaded.adapters)]
        self._by_name = {adapter.name: adapter for adapter in self._every}

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may ask for, beside the base's."""
        return tuple(self._by_name)

    def enter(self, name: str | None) -> Adapter:
        """The adapter that a request uses until `leave`: none if it asks for the base.

        Raises:
          ApiError: there is none of this name any more.
        """
        is_base = name is None or name == self._none.name
        adapter = self._none if is_base else self._by_name.get(name or "")
        if adapter is None:
            raise ApiError(404, f"model: {name!r} was unloaded", param="model", code=NOT_FOUND)
        adapter.streams += 1
        return adapter

    def leave(self, adapter: Adapter) -> None:
        """A request that used an adapter is over."""
        adapter.streams -= 1

    async def load(self, name: str, path: str) -> None:
        """Reads an adapter from a folder, and serves it from then on; also if nobody waits.

        Raises:
          ApiError: it cannot be loaded.
        """
        await asyncio.shield(asyncio.create_task(self._load(name, path)))

    async def _load(self, name: str, path: str) -> None:
        folder = self._folder(path)
        async with self._loading:
            if not name or len(name) > LONGEST_NAME or not name.isprintable():
                raise invalid(f"lora_name: {show(name)} is no name", "lora_name")
            if name in self._by_name or name == self._none.name:
                raise invalid(f"lora_name: {show(name)} is loaded already", "lora_name")
            self._every = [a for a in self._every if a.streams or a in self._by_name.values()]
            free = {*range(self._count)} - {adapter.place for adapter in self._every}
            if not free or self._put is None:
                used = f", of which {len(self._every) - len(self._by_name)} wait for last streams"
                raise invalid(
                    f"lora_name: all {self._count} places are taken{used if self._count else ''}; "
                    "unload one, or export the model with more --adapters", code="no_place",
                )  # fmt: skip
            place = min(free)
            try:
                await asyncio.to_thread(self._put, place, str(folder))
            except ValueError as error:
                raise invalid(f"lora_path: {error}", "lora_path") from error
            self._every.append(Adapter(name, place, next(self._serials)))
            self._by_name[name] = self._every[-1]

    def unload(self, name: str) -> None:
        """Refuses an adapter from now on; those that use it go on to their ends.

        Raises:
          ApiError: there is none of this name, or only those of the start are served.
        """
        self._allowed()
        if self._by_name.pop(name, None) is None:
            raise ApiError(404, f"lora_name: there is no {show(name)}", param="lora_name")

    def _allowed(self) -> Path:
        if self._root is None:
            raise ApiError(403, "adapters come and go if the server has a folder --adapters_from")
        return self._root

    def _folder(self, path: str) -> Path:
        root = self._allowed()
        try:
            folder = (root / path).resolve()
            if path and folder.is_relative_to(root) and folder.is_dir():
                return folder
        except (OSError, ValueError, RuntimeError):  # too long, with a null byte, links in a circle
            pass
        raise invalid(f"lora_path: {show(path)} is no folder below --adapters_from", "lora_path")


NOT_FOUND = "model_not_found"
