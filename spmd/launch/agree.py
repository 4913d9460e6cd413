"""Agreement: before processes compute together they compare their programs, settings and sources.

They use the key-value store alone: where something differs, a device collective would hang.
"""

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.errors import LaunchError
from spmd.launch.store import JobStore, job_store, this_process
from spmd.mesh.mesh import Mesh

TIMEOUT_S = 600.0
"""Seconds to wait for the slowest process: compiling takes minutes, and hosts differ."""

LONGEST = 200  # characters of a value that a message shows
Found = Mapping[int, Mapping[str, str]]  # process -> its `what`: name -> value

_calls: Counter[tuple[int, ...]] = Counter()


def check_same(
    what: Mapping[str, str],
    *,
    label: str = "flags",
    processes: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Raises LaunchError unless `what` is equal in all processes; does nothing with one process.

    All processes have to call it, in the same order.

    Args:
      what: names and values that should be equal everywhere, such as flags.
      label: what is compared, for messages.
      processes: those that take part; all if left out.
      timeout_s: seconds to wait for the slowest process.

    Raises:
      LaunchError: values differ, or a process did not come in time. It is raised on every process,
        and says which process has which value.

    Example:
      >>> check_same({"--steps": "100", "--mesh": "data=8"})
    """
    says = {"checked": label, **what}
    judged(says, refuse_differences, processes=processes, timeout_s=timeout_s)


def exchange(text: str, *, label: str, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Returns the texts of all processes, in the order of their numbers; with one process, its own.

    All processes have to call it, in the same order. No device takes part.

    Args:
      text: this process's text.
      label: what the texts are, for messages; the same in all processes.
      timeout_s: seconds to wait for the slowest process.

    Raises:
      LaunchError: a process did not come in time, or came to another exchange or check.

    Example:
      >>> exchange("4 files", label="files found")
      ['4 files']
    """
    told = judged(
        {"checked": label, "says": text},
        lambda found: [what["says"] for what in found.values()],
        timeout_s=timeout_s,
    )
    return told or [text]


def from_first(text: str, *, label: str) -> str:
    """Returns process 0's text on every process; all have to call it, see `exchange`."""
    return exchange(text, label=label)[0]


def judged(
    what: Mapping[str, str],
    judge: Callable[[Found], Any],
    *,
    processes: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Returns `judge(found)` on each process, where `found` has every process's `what`, by number.

    The first process runs `judge`, whose result has to fit JSON and be no dict. `what["checked"]`
    names the call and has to be the same in all. None if alone or not in `processes`. LaunchError
    on all if `judge` raises one, these names differ, or a process does not come in time.
    """
    store, (me, count) = job_store(), this_process()
    members = tuple(range(count) if processes is None else sorted(processes))
    if store is None or len(members) < 2 or me not in members:
        return None
    # The call's number is part of the key, so that nobody reads an earlier outcome. All members
    # count alike, since they call in the same order. Groups count by themselves, because not every
    # process takes part in every group.
    _calls[members] += 1
    group = "all" if len(members) == count else "-".join(map(str, members))
    return gathered(store, f"same/{group}/{_calls[members]}", members, me, what, judge, timeout_s)


def gathered(
    store: JobStore,
    folder: str,
    members: Sequence[int],
    me: int,
    what: Mapping[str, str],
    judge: Callable[[Found], Any],
    timeout_s: float,
) -> Any:
    """Does what `judged` says, as process `me` of `members`, by texts in `folder` of the store."""
    # Processes 0 1 2 with --steps 100 100 90:
    #   each writes same/all/1/<its number>; 0 waits for all three
    #   0 writes same/all/1/outcome: "process 2: 90; processes 0, 1: 100"
    #   all three read that, and raise the same error
    # Had 2 not come, the outcome would say so after `timeout_s`. The others wait half as long
    # again, so that 0's answer reaches them before their own patience ends.

    def come(process: int, text: str | None) -> str:
        if text is None:
            raise LaunchError(
                f"process {process} did not come to compare {what['checked']} within "
                f"{timeout_s:g} s",
                fix="see what it does: its output, or the files of a watchdog",
            )
        return text

    def outcome() -> Any:
        found = {
            process: json.loads(come(process, store.get(f"{folder}/{process}", timeout_s)))
            for process in members
        }
        refuse_differences({p: {"checked": said["checked"]} for p, said in found.items()})
        return judge(found)

    store.put(f"{folder}/{me}", json.dumps(what))
    if me == members[0]:
        store.put(f"{folder}/outcome", written(outcome))
    return heard(come(members[0], store.get(f"{folder}/outcome", 1.5 * timeout_s)))


def written(work: Callable[[], Any]) -> str:
    """Returns as JSON what `work` returns, or the `LaunchError` that it raises; see `heard`."""
    try:
        return json.dumps(work())
    except LaunchError as error:
        return json.dumps({"what": error.what, "actual": error.actual, "fix": error.fix})


def heard(text: str) -> Any:
    """Returns what is in a text by `written`, or raises the `LaunchError` that is in it."""
    found = json.loads(text)
    if isinstance(found, dict):
        raise LaunchError(**found)
    return found


def refuse_differences(found: Found) -> None:
    """Raises LaunchError if processes differ in a value; it tells which process has which."""
    parts = {}
    for name in dict.fromkeys(name for what in found.values() for name in what):
        values = {process: what.get(name, "(not set)") for process, what in found.items()}
        if len(set(values.values())) > 1:
            parts[name] = _who_has_what(values)
    if not parts:
        return
    if "checked" in parts:  # they are at different places: nothing else can be compared
        parts = {"what they do next": parts["checked"]}
    each = parts.values() if len(parts) == 1 else (f"{n}: {text}" for n, text in parts.items())
    raise LaunchError(
        f"the processes of this job differ in {', '.join(parts)}",
        actual="; ".join(each),
        fix="start every process with the same program, flags and versions",
    )


def _who_has_what(values: Mapping[int, str]) -> str:
    """Returns who has which value: `process 1: b; processes 0, 2: a`, the most common one last."""
    counts = Counter(values.values())
    common = max(counts, key=lambda value: counts[value])  # of equals the first: process 0's
    rest = [process for process, value in values.items() if value != common]
    texts = [f"process {process}: {_short(values[process])}" for process in rest[:8]]
    if len(rest) > 8:
        texts.append(f"{len(rest) - 8} more differ")
    many = [str(process) for process, value in values.items() if value == common]
    who = f"process {many[0]}" if len(many) == 1 else f"processes {', '.join(many)}"
    if len(many) > 8:
        who = f"{len(many)} others"
    return "; ".join([*texts, f"{who}: {_short(common)}"])


def _short(value: str) -> str:
    if len(value) <= LONGEST:
        return value
    return f"{value[:LONGEST]}... ({len(value)} characters, hash {digest(value)})"


def digest(text: str) -> str:
    """Returns a short hash of a text, the same in every process: 12 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# Programs: before XLA sees one, the processes of its mesh compare what they have compiled.


PROCESS_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
"""How the names of XLA flags begin that may differ from process to process."""


def check_same_program(
    name: str, emitted: str, mesh: Mesh, jax_mesh: jax.sharding.Mesh, more: Mapping[str, str]
) -> None:
    """Raises LaunchError if processes differ in a program, mesh, settings of jax or XLA, or `more`.

    Processes with devices in `jax_mesh` take part. Source locations in `emitted` do not count.
    """
    processes = sorted({device.process_index for device in jax_mesh.devices.flat})
    if len(processes) < 2:
        return
    what = {
        "number of devices": str(jax.device_count()),
        "mesh": str(mesh),
        "order of devices": digest(str(mesh.device_ids)),
        "program hash": digest(without_locations(emitted)),
        **settings(),
        **more,
    }
    check_same(what, label=f"program {name}", processes=processes)


def without_locations(module: str) -> str:
    """Returns a module's text without source files' names, which differ between hosts."""
    return "\n".join(line for line in module.splitlines() if not line.startswith("#loc"))


def settings() -> dict[str, str]:
    """Returns name -> value of jax's settings and XLA's flags that may change what is computed."""
    names = "enable_x64 default_matmul_precision default_prng_impl threefry_partitionable"
    found = {f"jax_{name}": str(getattr(jax.config, f"jax_{name}")) for name in names.split()}
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        for flag in os.environ.get(variable, "").split():
            key, _, value = flag.partition("=")
            if not key.startswith(PROCESS_FLAGS):
                found[f"{variable} {key}"] = value or "(given)"
    return found


# Sources. Versions say what was installed. A checkout and a user's own files have none: two hosts
# that read different ones would train different things, or hang.


def imported() -> dict[str, str]:
    """Returns name -> hash of the file of each imported module that is no installed package's.

    The program itself is `__main__`. The standard library and the paths of files do not count.
    """
    inside = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
    packages = {"site-packages", "dist-packages"}  # what is below them has a version
    found = {}
    for name, module in list(sys.modules.items()):
        if name == "__mp_main__":  # the program again, under the name that its workers use
            continue
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith((".py", ".so")):
            continue
        if not file.startswith(inside) and not packages & set(Path(file).parts):
            found[name] = hash_of([Path(file)])
    return found


def by_package(modules: Mapping[str, str]) -> dict[str, str]:
    """Returns top-level package -> one hash for its modules, given a hash for each module."""
    tops: dict[str, list[str]] = {}
    for name, sha in sorted(modules.items()):
        tops.setdefault(name.partition(".")[0], []).append(f"{name} {sha}")
    return {top: digest("\n".join(modules)) for top, modules in tops.items()}


def hash_of(files: Iterable[Path]) -> str:
    """Returns a hash of the contents of files; a file that is not there any more adds nothing."""
    hashed = hashlib.sha256()
    for path in files:
        with contextlib.suppress(OSError):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def check_same_sources() -> None:
    """Raises LaunchError on all processes if one has imported other source files than process 0.

    `spmd.initialize` has compared what was imported by then; this finds what came later. Modules
    that only some processes have imported are not compared. All processes have to call it.
    """
    judged({"checked": "sources", **imported()}, refuse_other_sources)


def refuse_other_sources(found: Found) -> None:
    """Raises LaunchError if a module differs between process 0 and another that has it, too."""
    different: dict[str, int] = {}
    for process, theirs in found.items():
        for name in found[0].keys() & theirs.keys():
            if theirs[name] != found[0][name]:
                different.setdefault(name, process)
    if not different:
        return
    names = sorted(different)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise LaunchError(
        f"the processes of this job run different sources of {', '.join(names[:3])}{more}",
        actual=f"process {different[names[0]]} has another {names[0]} than process 0",
        fix="give every host the same files",
    )
