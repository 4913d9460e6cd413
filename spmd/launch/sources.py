"""Sources that processes run: what was imported from outside the environment, as hashes.

Versions say what was installed. A checkout and a user's own files have none: two hosts that read
different ones would train different things, or hang.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from spmd.errors import LaunchError
from spmd.launch.agree import Found, as_json, judged, raise_json

_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages; what is below them has a version."""

SHOWN = 3


def imported() -> dict[str, str]:
    """Module -> a hash of its file, of all modules that are imported from outside the environment.

    The program itself is `__main__`. Paths do not count: they differ between hosts.
    """
    inside = tuple(
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    found = {}
    for name, module in list(sys.modules.items()):
        if name == "__mp_main__":  # the program again, under the name that its workers use
            continue
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith((".py", ".so")):
            continue
        if not file.startswith(inside) and not _PACKAGES & set(Path(file).parts):
            found[name] = hash_of([Path(file)])
    return found


def by_package(modules: Mapping[str, str]) -> dict[str, str]:
    """Top-level package -> a hash of its modules."""
    tops: dict[str, list[str]] = {}
    for name, sha in sorted(modules.items()):
        tops.setdefault(name.partition(".")[0], []).append(f"{name} {sha}")
    return {top: hashlib.sha256("\n".join(m).encode()).hexdigest()[:12] for top, m in tops.items()}


def hash_of(files: Iterable[Path]) -> str:
    """A hash of the contents of files; of one that is not there any more, of nothing."""
    hashed = hashlib.sha256()
    for path in files:
        try:
            hashed.update(path.read_bytes())
        except OSError:
            continue
    return hashed.hexdigest()[:12]


def check_same_sources() -> None:
    """Compares what was imported with what the other processes imported; a no-op with one process.

    `spmd.initialize` has compared what was imported by then; this finds what came later. Modules
    that only some processes have imported are not compared. All processes have to call it.

    Raises:
      LaunchError: a module differs. It is raised on every process.
    """
    raise_json(judged({"checked": "sources", **imported()}, different_sources) or "")


def different_sources(found: Found) -> str:
    """The modules that differ between processes, as the JSON of a `LaunchError`; "" if none do."""
    different: dict[str, int] = {}
    for process, theirs in found.items():
        for name in found[0].keys() & theirs.keys():
            if theirs[name] != found[0][name]:
                different.setdefault(name, process)
    if not different:
        return ""
    names = sorted(different)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return as_json(
        LaunchError(
            f"the processes of this job run different sources of {', '.join(names[:SHOWN])}{more}",
            actual=f"process {different[names[0]]} has another {names[0]} than process 0",
            fix="give every host the same files",
        )
    )
