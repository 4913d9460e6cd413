"""What starting again need not do again: plans, and XLA's executables, in the user's cache folder.

A plan is kept as the emitted program that came of it, as JSON of ours; an executable by jax's own
compilation cache. Nothing is pickled, and nothing that a bundle brings along is read from here or
written to it: the key is a digest of all that decides the result.
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmd.ir.types import Dense, TensorType
from spmd.lowering.emit import Constant, Emitted
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import jax_mesh
from spmd.models.compiled import keeping_compiled
from spmd.options import Options
from spmd.store import Store, key_of, user_folder

# How jax's warnings begin.
_CANNOT_READ = "Error reading persistent compilation cache entry"
_CANNOT_WRITE = "Error writing persistent compilation cache entry"


def default_cache_dir() -> Path:
    """The user's cache folder for this: `$XDG_CACHE_HOME/spmd`, else `~/.cache/spmd`."""
    return user_folder()


class Cache:
    """Emitted programs and executables in a folder; what cannot be read is made anew.

    Args:
      folder: made if it is not there.

    Attributes:
      problem: why something could not be kept; None if everything could.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.plans = Store(self.folder / "plans")
        self.problem: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell people of the cache, if it could not keep all."""
        if self.problem is None:
            return ()
        return (
            f"{self.folder} cannot keep all that was made ({self.problem}): the next start takes "
            "as long as this one; name another folder as the cache, or make room",
        )

    def emitted(
        self, module: bytes, mesh: Mesh, options: Options, asked: Any, make: Callable[[], Emitted]
    ) -> Emitted:
        """What a module becomes, from the folder or made and put there.

        Args:
          module: the function's file.
          mesh, options: what it is compiled for.
          asked: whatever else decides the result; its repr counts.
          make: makes it.
        """
        options = dataclasses.replace(options, cache_dir=None)  # their folder decides nothing
        where = [(d.platform, d.device_kind, d.process_index) for d in jax_mesh(mesh).devices.flat]
        key = key_of(hashlib.sha256(module).digest(), mesh, mesh.dcn_sizes, where, options, asked)
        found = self.plans.get(key)
        if found is not None:
            return from_text(found.decode(), mesh)
        made = make()
        self.problem = self.plans.put(key, as_text(made).encode()) or self.problem
        return made

    @contextlib.contextmanager
    def executables(self) -> Iterator[None]:
        """Inside, what is compiled is kept by jax, and taken from there.

        jax warns of every entry that it cannot read or write, and never replaces one: damaged ones
        are removed here before they are compiled anew, and what cannot be kept is noted once.
        """
        folder, began = self.folder / "executables", time.time()

        def heed(warning: str) -> None:
            if not warning.startswith(_CANNOT_READ):
                self.problem = warning.rpartition(": ")[2]
                return
            for path in folder.glob("*-cache"):  # jax does not say which one is damaged
                with contextlib.suppress(OSError):  # another process may be faster
                    if path.stat().st_mtime < began:
                        path.unlink()

        with keeping_compiled(folder), _hearing(heed, _CANNOT_READ, _CANNOT_WRITE):
            yield


@contextlib.contextmanager
def _hearing(heed: Callable[[str], None], *beginnings: str) -> Iterator[None]:
    """Hands over warnings that begin so, from any thread; all others are shown as ever."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def choose(message: Any, *more: Any, **named: Any) -> None:
            if str(message).startswith(beginnings):
                heed(str(message))
            else:
                show(message, *more, **named)

        for beginning in beginnings:
            warnings.filterwarnings("always", message=beginning)
        warnings.showwarning = choose
        yield


def as_text(emitted: Emitted) -> str:
    """A program as JSON, without its mesh."""
    content = dataclasses.asdict(emitted)
    content["mesh"] = None  # it is in the key
    for ends in ("arguments", "results"):
        content[ends] = [(s.dims, s.partial, s.kind) for s in content[ends]]
    content["constants"] = [
        (value.type, base64.b64encode(value.data).decode(), sharding.dims)
        for value, sharding in emitted.constants
    ]
    return json.dumps(content)


def from_text(text: str, mesh: Mesh) -> Emitted:
    """The program that `as_text` wrote."""
    content = {name: _frozen(value) for name, value in json.loads(text).items()}
    for ends in ("arguments", "results"):
        content[ends] = tuple(Sharding(*fields) for fields in content[ends])
    for types in ("argument_types", "result_types"):
        content[types] = tuple(TensorType(*fields) for fields in content[types])
    content["constants"] = tuple(
        Constant(Dense(TensorType(*type_), base64.b64decode(data), splat=False), Sharding(dims))
        for type_, data, dims in content["constants"]
    )
    return Emitted(**{**content, "mesh": mesh})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
