"""Agreement: before processes compute together they compare their programs, settings and sources.

They use the key-value store alone: where something differs, a device collective would hang.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import sys
import sysconfig
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax

from spmd import errors
from spmd.errors import LaunchError, PlanError, SpmdError
from spmd.launch.doing import is_computing
from spmd.launch.store import JobStore, job_store, this_process
from spmd.mesh.mesh import Mesh
from spmd.progress import waiting

TIMEOUT_S = 600.0
"""Seconds to wait for the slowest process: compiling takes minutes, and hosts differ."""

ASK_S = 4.0  # so long a process waits before it asks what keeps the others
LONGEST = 200  # characters of a value that a message shows
Found = Mapping[int, Mapping[str, str]]  # process -> its `what`: name -> value

AWAITED = "awaited"
"""The occasion at which a process waits that does nothing else meanwhile."""

_line: ContextVar[str] = ContextVar("line of comparisons", default="")
_numbers: Counter[tuple[tuple[int, ...], str]] = Counter()
_excused: set[str] = set()  # folders of occasions to which this process said that it does not come
_counting = threading.Lock()


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
    folder, is_excused, ask = _next(store, members, what["checked"])
    return gathered(store, folder, members, me, what, judge, timeout_s, is_excused, ask)


def gathered(
    store: JobStore,
    folder: str,
    members: Sequence[int],
    me: int,
    what: Mapping[str, str],
    judge: Callable[[Found], Any],
    timeout_s: float,
    is_excused: bool = False,
    ask: Callable[[], None] = lambda: None,
) -> Any:
    """Does what `judged` says in `folder`, calling `ask` as it waits; one excused only listens."""
    # Processes 0 1 2 with --steps 100 100 90:
    #   each writes same/.../1/<its number>; 0 waits for all three
    #   0 writes same/.../1/outcome: "process 2: 90; processes 0, 1: 100"
    #   all three read that, and raise the same error
    # Had 2 not come, the outcome would say so after `timeout_s`. The others wait half as long
    # again, so that 0's answer reaches them before their own patience ends.

    def come(process: int, name: object, timeout_s: float) -> str:
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            text = store.get(f"{folder}/{name}", min(left, ASK_S))
            if text is not None:
                return text
            ask()
        raise LaunchError(
            f"process {process} did not come to compare {what['checked']} within {timeout_s:g} s",
            fix="see what it does: its output, or the files of a watchdog",
        )

    def outcome() -> Any:
        found = {process: json.loads(come(process, process, timeout_s)) for process in members}
        refuse_differences({p: {"checked": said["checked"]} for p, said in found.items()})
        return judge(found)

    with waiting("the other processes"):
        if not is_excused:
            store.put(f"{folder}/{me}", json.dumps(what))
            if me == members[0]:
                store.put(f"{folder}/outcome", written(outcome))
        return heard(come(members[0], "outcome", 1.5 * timeout_s))


# Occasions: which comparisons of the processes belong together. Comparisons of one line are
# counted, and those of the same number belong together, so processes that come to different ones
# find out at once. The main thread is a line, and so is what runs inside of `line`. On other
# threads nobody knows the order: there each label is a line.


@contextlib.contextmanager
def line(name: str) -> Iterator[None]:
    """Makes what is compared inside a line of its own, whichever thread it runs on.

    Example:
      >>> with line("loading"):  # on the main thread of one process, on another's second thread
      ...     check_same({"--mesh": "data=8"})
    """
    token = _line.set(name)
    try:
        yield
    finally:
        _line.reset(token)


def _next(
    store: JobStore, members: tuple[int, ...], label: str
) -> tuple[str, bool, Callable[[], None]]:
    """Returns the next occasion's folder, whether this process is excused, and a way to ask."""
    is_main = threading.current_thread() is threading.main_thread()
    own = _line.get() or ("" if is_main else f"aside: {label}")
    with _counting:
        _numbers[members, own] += 1
        number = _numbers[members, own]
        folder = _folder(members, own, number)
        is_excused = folder in _excused

    def ask() -> None:
        """Says that this process can do nothing else before the others come."""
        if (is_main or _line.get()) and not is_computing():
            store.put(AWAITED, json.dumps([members, own, number]))

    return folder, is_excused, ask


def _folder(members: Sequence[int], own: str, number: int) -> str:
    return f"same/{digest(f'{[*members]} {own}')}/{number}"


def excuse(store: JobStore, awaited: str, doing: str) -> None:
    """Comes to an awaited occasion in place of the main thread, which cannot come any more.

    What it does instead differs from what the others do, and so all of them hear of it.
    """
    listed, own, number = json.loads(awaited)
    members, (me, _) = tuple(listed), this_process()
    folder = _folder(members, own, number)
    with _counting:
        if me not in members or _numbers[members, own] >= number or folder in _excused:
            return
        _excused.add(folder)
    store.put(f"{folder}/{me}", json.dumps({"checked": doing}))
    if me == members[0]:
        said = store.all(folder).items()
        found = {int(name): json.loads(text) for name, text in said if name.isdigit()}
        store.put(f"{folder}/outcome", written(lambda: refuse_differences(found)))


def is_open(store: JobStore, awaited: str) -> bool:
    """Whether an awaited occasion has no outcome yet."""
    return store.get(f"{_folder(*json.loads(awaited))}/outcome") is None


def made_by_first(
    make: Callable[[], str], *, label: str, processes: Sequence[int] | None = None
) -> str:
    """Returns what the first process makes; the others wait for it, as long as that takes.

    All call it, in the same order, once a comparison has shown that all are there. What `make`
    raises is raised on all of them; a LaunchError says so if that is none of ours.
    """
    store, (me, count) = job_store(), this_process()
    members = tuple(range(count) if processes is None else sorted(processes))
    if store is None or len(members) < 2 or me not in members:
        return make()
    key = f"{_next(store, members, label)[0]}/made"
    if me == members[0]:
        try:
            made = make()
        except BaseException as error:
            failed = LaunchError(f"process {me} failed at {label}", actual=_short(repr(error)))
            store.put(key, _error_text(error if isinstance(error, SpmdError) else failed))
            raise
        store.put(key, json.dumps([packed(made)]))
        return made
    with waiting(f"process {members[0]}: {label}"):
        while (text := store.get(key, ASK_S)) is None:
            pass  # if that process is lost, this one is stopped by the thread that watches it
    return unpacked(heard(text))


def packed(text: str) -> str:
    """Returns a long text as a short one: `unpacked` returns it."""
    return base64.b85encode(zlib.compress(text.encode(), 1)).decode()


def unpacked(text: str) -> str:
    """Returns the text that was `packed`."""
    return zlib.decompress(base64.b85decode(text)).decode()


def written(work: Callable[[], Any]) -> str:
    """Returns as JSON `[what work returns]`, or the `SpmdError` that it raises; see `heard`."""
    try:
        return json.dumps([work()])
    except SpmdError as error:
        return _error_text(error)


def _error_text(error: SpmdError) -> str:
    names = ("what", "op", "source", "actual", "required", "fix")
    fields = {name: getattr(error, name) for name in names}
    kind, least = type(error).__name__, getattr(error, "least_bytes", 0)
    return json.dumps({"kind": kind, "fields": fields, "least_bytes": least})


def heard(text: str) -> Any:
    """Returns what another process has `written`, or raises its `SpmdError`."""
    found = json.loads(text)
    if not isinstance(found, dict):
        return found[0]
    error = getattr(errors, found["kind"], LaunchError)(**found["fields"])
    if isinstance(error, PlanError):
        error.least_bytes = found["least_bytes"]
    raise error


def refuse_differences(found: Found) -> None:
    """Raises LaunchError if processes differ in a value; it tells which process has which."""
    parts = {}
    for name in dict.fromkeys(name for what in found.values() for name in what):
        values = {process: what.get(name, "(not set)") for process, what in found.items()}
        if len(set(values.values())) > 1:
            parts[name] = who_has_what(values)
    if not parts:
        return
    fix = "start every process with the same program, flags and versions"
    if "checked" in parts:  # they are at different places: nothing else can be compared
        parts = {"what they do next": parts["checked"]}
        fix = (
            "let every process make the same calls, in one order and with arguments of the same "
            "shapes: pad or drop a last, smaller batch, and evaluate on all of them"
        )
    each = parts.values() if len(parts) == 1 else (f"{n}: {text}" for n, text in parts.items())
    raise LaunchError(
        f"the processes of this job differ in {', '.join(parts)}",
        actual="; ".join(each),
        fix=fix,
    )


def who_has_what(values: Mapping[int, str]) -> str:
    """Says who has which value: `process 1: b; processes 0, 2: a`, the most common value last."""
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


Texts = Mapping[str, tuple[str, Callable[[], str]]]
"""Name -> a text's hash without source locations, and how to get the text with them."""


def check_same_program(
    label: str, texts: Texts, mesh: Mesh, processes: Sequence[int], more: Mapping[str, str]
) -> None:
    """Compares a program's texts, its mesh, settings of jax and XLA, and `more`, as `check_same`.

    Of texts that differ, the first line that does is told. Source locations do not count.
    """
    what = {
        "checked": label,
        "number of devices": str(jax.device_count()),
        "mesh": str(mesh),
        "order of devices": digest(str(mesh.device_ids)),
        **settings(),
        **more,
    }
    hashes = {name: hash_ for name, (hash_, _) in texts.items()}
    other = judged(what | hashes, partial(_other_text, hashes.keys()), processes=processes)
    if other:
        name, process = other
        has_it = this_process()[0] in (min(processes), process)
        says = {"checked": label, "text": packed(texts[name][1]()) if has_it else ""}
        judged(says, partial(_refuse_lines, name, process, label), processes=processes)


def _other_text(names: Iterable[str], found: Found) -> tuple[str, int] | None:
    """Returns a text's name, and a process whose hash differs; LaunchError if others differ."""
    refuse_differences(
        {p: {k: v for k, v in w.items() if k not in names} for p, w in found.items()}
    )
    first = found[min(found)]
    different = ((n, p) for n in names for p, what in found.items() if what[n] != first[n])
    return next(different, None)


def _refuse_lines(name: str, process: int, label: str, found: Found) -> None:
    """Raises LaunchError with the first line in which a process's text differs."""
    first = min(found)
    pair = (_lines(unpacked(found[p]["text"])) for p in (first, process))
    both = zip_longest(*pair, fillvalue=("nothing", None))
    ours, theirs = next((a, b) for a, b in both if a[0] != b[0])
    raise LaunchError(
        f"the processes of this job differ in {name}, {label}",
        source=theirs[1] or ours[1],
        actual=f"process {process}: {_short(theirs[0])}; process {first}: {_short(ours[0])}",
        fix="let what the function closes over or asks for (a seed, a flag, a host's name, the "
        "order of a set) be equal on all processes, or an argument",
    )


_LOC = re.compile(r'\s*loc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\)')
_ALIAS, _FILE = re.compile(r"#loc\d*"), re.compile(r'"([^"]+)":(\d+):')


def without_locations(module: str) -> str:
    """Returns a module's text without source locations, which differ between hosts."""
    lines = (line for line in module.splitlines() if not line.startswith("#loc"))
    return "\n".join(_LOC.sub("", line) for line in lines)


def _lines(module: str) -> list[tuple[str, str | None]]:
    """Returns a module's lines without locations, each with its source line."""
    known = dict(line.split(" = ", 1) for line in module.splitlines() if line.startswith("#loc"))

    def source(text: str) -> str | None:  # of a call's location, the one inside comes first
        if place := _FILE.search(text):
            return f"{place[1]}:{place[2]}"
        return next(filter(None, (source(known[name]) for name in _ALIAS.findall(text))), None)

    lines = (line for line in module.splitlines() if not line.startswith("#loc"))
    return [(_LOC.sub("", line).strip(), source(line[line.rfind(" loc(") :])) for line in lines]


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
