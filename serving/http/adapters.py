"""Adapters that are served beside their base, each a model by its name, in a place of its own.

A place is given to another adapter once the last stream of the one before has ended; those who ask
for one that was unloaded are refused from then on.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

from spmd.serving.engine.actions import Job
from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.fields import show
from spmd.serving.http.language import Loaded

NOT_FOUND = "model_not_found"


def no_model(name: str, there: Iterable[str]) -> ApiError:
    """The answer to a name that is none of those that are there."""
    message = (
        f"model: there is no {name[:100]!r} here; this server has {', '.join(map(repr, there))}"
    )
    return ApiError(404, message, param="model", code=NOT_FOUND)


@dataclasses.dataclass(eq=False)
class Adapter:
    """One that was loaded, perhaps under a name that another one had before; or none at all."""

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
        self._put, self._count = loaded.adapt, 0
        if loaded.language is not None:
            self._count = loaded.language.limits.adapters
        self._root = None if root is None else Path(root).resolve()
        self._serials, self._loading = itertools.count(), asyncio.Lock()
        names = (loaded.name, *loaded.adapters)
        self._by_name = {n: Adapter(i, next(self._serials)) for i, n in enumerate(names, start=-1)}
        self._every = [*self._by_name.values()]  # and those whose last streams go on

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may ask for; the base's is the first."""
        return tuple(self._by_name)

    def enter(self, name: str | None) -> Adapter:
        """The adapter that a request uses until it is over; an `ApiError` if it was unloaded."""
        adapter = self._by_name.get(self.names[0] if name is None else name)
        if adapter is None:
            raise ApiError(404, f"model: {name!r} was unloaded", param="model", code=NOT_FOUND)
        adapter.streams += 1
        return adapter

    def leave(self, adapter: Adapter) -> None:
        """A request that used an adapter is over."""
        adapter.streams -= 1

    async def load(self, name: str, path: str) -> None:
        """Serves an adapter from then on, or raises an `ApiError`; not to be cancelled."""
        folder = self._folder(path)
        async with self._loading:
            if not 0 < len(name) <= 256 or not name.isprintable() or name in self._by_name:
                raise invalid(f"lora_name: {show(name)} is loaded, or is no name")
            self._every = [a for a in self._every if a.streams or a in self._by_name.values()]
            free = {*range(self._count)} - {adapter.place for adapter in self._every}
            if not free or self._put is None:
                ending = len(self._every) - len(self._by_name)
                raise invalid(
                    f"lora_name: all {self._count} places are taken, {ending} of them by last "
                    "streams; unload an adapter, or export the model with more --adapters",
                    code="no_place",
                )
            try:
                await asyncio.to_thread(self._put, min(free), str(folder))
            except ValueError as error:
                raise invalid(f"lora_path: {error}") from error
            self._by_name[name] = Adapter(min(free), next(self._serials))
            self._every.append(self._by_name[name])

    def unload(self, name: str) -> None:
        """Refuses an adapter from now on, if there is one; those that use it go on."""
        self._folder(".")
        if name not in self.names[1:]:
            raise ApiError(404, f"lora_name: there is no {show(name)}", param="lora_name")
        del self._by_name[name]

    def _folder(self, path: str) -> Path:
        if self._root is None:
            raise ApiError(403, "adapters come and go if the server has a folder --adapters_from")
        try:
            folder = (self._root / path).resolve()
            if path and folder.is_relative_to(self._root) and folder.is_dir():
                return folder
        except (OSError, ValueError, RuntimeError):  # too long, with a null byte, links in a circle
            pass
        raise invalid(f"lora_path: {show(path)} is no folder below --adapters_from")
