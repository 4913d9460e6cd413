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
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spmd import errors
from spmd.errors import LaunchError, SpmdError
from spmd.launch.doing import Sign, all_signs, is_computing, is_users, sign_of
from spmd.launch.store import JobStore, job_store, listed, this_process
from spmd.mesh.mesh import Mesh
from spmd.progress import waiting

TIMEOUT_S = 600.0
"""Seconds to wait for the slowest process: compiling takes minutes, and hosts differ."""

ASK_S = 4.0  # so long a process waits before it looks what keeps the others
LONGEST = 200  # characters of a value that a message shows
LISTED = 8  # differences that a message shows
OTHERS = "the other processes"  # for which a process waits
Found = Mapping[int, Mapping[str, str]]  # process -> its `what`: name -> value

_line: ContextVar[str] = ContextVar("line of comparisons", default="")
_numbers: Counter[tuple[tuple[int, ...], str]] = Counter()
_counting = threading.Lock()


def check_same(
    what: Mapping[str, str],
    *,
    label: str = "flags",
    processes: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Raises LaunchError unless `what` is equal in all processes; does nothing with one process.

    All processes have to call it, and make all such calls in the same order.

    Args:
      what: name -> value of what should be equal everywhere, such as flags.
      label: what is compared, for messages; the same in all processes.
      processes: the numbers of those that take part; all if left out. Others do nothing.
      timeout_s: seconds to wait for the slowest process.

    Raises:
      LaunchError: names or values differ, or a process did not come in time. It is raised on every
        process, and says which process has which value.

    Example:
      >>> check_same({"--steps": "100", "--mesh": "data=8"})
    """
    judged({"checked": label, **what}, refuse_differences, processes=processes, timeout_s=timeout_s)


def exchange(text: str, *, label: str, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Returns the texts of all processes, in the order of their numbers; with one process, its own.

    All processes have to call it, and make all such calls in the same order. No device takes part.

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
    """Returns `judge(found)` on each process; `found` maps each process's number to its `what`.

    Only the process of the lowest number runs `judge`, whose result has to fit JSON. Returns None
    on a process that is alone or not in `processes` (None: all). LaunchError on all if `judge`
    fails, `what["checked"]`, which names the call, differs, or one does not come in `timeout_s`.
    """
    occasion, me = _next(what["checked"], processes), this_process()[0]
    return occasion and occasion.judged(me, what, judge, timeout_s)


def made_by_first(
    make: Callable[[], str], *, label: str, processes: Sequence[int] | None = None
) -> str:
    """Returns on all `processes` (None: all) the text that `make` returns on the lowest-numbered.

    All call it after a comparison, and wait as long as it takes. They raise what `make` raises (the
    others a LaunchError if it is no SpmdError). One alone or not in `processes` makes its own.
    """
    occasion = _next(label, processes)
    if occasion is None:
        return make()
    first = occasion.members[0]
    if this_process()[0] == first:
        return str(deciding(make, partial(occasion.store.put, occasion.outcome), label))
    with waiting(f"process {first}: {label}"):
        while (text := occasion.store.get(occasion.outcome, ASK_S)) is None:
            pass  # if that process is lost, this one is stopped by the thread that watches it
    return str(heard(text))


class Occasion(NamedTuple):
    """One comparison among `members` (process numbers); `folder` is its place in the store.

    Each member writes a record there, the first one the outcome. Comparisons are counted on each
    line, and those of the same number belong together. A line is a sequence of comparisons: those
    of the main thread, those inside one name of `line`, or on other threads those of one label.
    """

    # Processes 0 1 2 with --steps 100 100 90:
    #   each writes same/.../1/<its number>; 0 waits for all three
    #   0 writes same/.../1.outcome: "process 2: 90; processes 0, 1: 100"
    #   all three raise the same error
    # Had 2 not come, the outcome would say so after `timeout_s`. The others wait half as long
    # again, so that 0's answer reaches them before their own patience ends.

    store: JobStore
    members: tuple[int, ...]
    folder: str
    is_aside: bool  # on a thread of its own: the main one may do what the others wait for

    @property
    def outcome(self) -> str:
        """The key in the store under which the first member puts the outcome for the others."""
        return f"{self.folder}.outcome"

    def judged(
        self, me: int, what: Mapping[str, str], judge: Callable[[Found], Any], timeout_s: float
    ) -> Any:
        """Does what the function `judged` says; `me` is the number of this process."""
        label = what["checked"]

        def come(process: int, name: str, timeout_s: float) -> str:
            end, seen = time.monotonic() + timeout_s, None
            while (left := end - time.monotonic()) > 0:
                if (text := self.store.get(name, min(left, ASK_S))) is not None:
                    return text
                if not self.is_aside and not is_computing():
                    seen = self.look_for(process, me, label, seen)
            raise LaunchError(
                f"process {process} did not come to compare {label} within {timeout_s:g} s",
                fix="see what it does: its output, or the files of a watchdog",
            )

        def decide() -> Any:
            names = {process: f"{self.folder}/{process}" for process in self.members}
            found = {p: _unpacked(come(p, name, timeout_s)) for p, name in names.items()}
            refuse_differences({p: {"checked": said["checked"]} for p, said in found.items()})
            return judge(found)

        with waiting(OTHERS):
            self.store.put(f"{self.folder}/{me}", _packed(dict(what)))
            if me == self.members[0]:
                return deciding(decide, partial(self.store.put, self.outcome), label)
            return heard(come(self.members[0], self.outcome, 1.5 * timeout_s))

    def look_for(self, process: int, me: int, label: str, seen: Sign | None) -> Sign | None:
        """Looks what `process` does, for which this one, `me`, waits to compare `label`.

        Returns the sign to pass as `seen` at the next look: the first one read in its present run
        of a program, or its last one if it runs none; None if it gives none. LaunchError if it
        stays in a program that this process does not run, and so cannot come.
        """
        # Process 1 compiles for its last, smaller batch; 0 runs what was compiled for the others:
        #   0 s   1 waits for 0 to compare what it compiles; 0 is inside a collective, and waits for
        #         1, but 1 has nothing on its devices
        #   4 s   1 reads what 0 does. It may be at the end of what 1 has finished
        #  14 s   0 still runs that, and for longer than before 1 looked: 1 raises an error, and 0
        #         stops since 1 failed
        # A process that neither comes nor runs anything may come yet: then one of those that wait
        # tells who does what.
        if (now := sign_of(self.store, process)) is None:
            return None
        if seen is None and me in self.members[:2] and OTHERS not in now.doing:
            told = who_has_what({p: sign.doing for p, sign in all_signs(self.store).items()})
            print(f"note: processes of this job wait for others: {told}", file=sys.stderr)
        if seen is None or not now.runs or now.look - now.runs != seen.look - seen.runs:
            return now  # it runs none, or another one than at the first look
        if now.look - seen.look >= seen.runs:
            refuse_differences({process: {"checked": now.doing}, me: {"checked": label}})
        return seen


@contextlib.contextmanager
def line(name: str) -> Iterator[None]:
    """Makes the comparisons inside, on any thread, a sequence of their own, matched by `name`.

    Example:
      >>> with line("loading"):  # on the main thread of one process, on another's second thread
      ...     check_same({"--mesh": "data=8"})
    """
    token = _line.set(name)
    try:
        yield
    finally:
        _line.reset(token)


def _next(label: str, processes: Sequence[int] | None) -> Occasion | None:
    """Returns the next occasion of `processes` (None: all); None if alone or not one of them."""
    store, (me, count) = job_store(), this_process()
    members = tuple(range(count) if processes is None else sorted(processes))
    if store is None or len(members) < 2 or me not in members:
        return None
    is_aside = threading.current_thread() is not threading.main_thread() and not _line.get()
    own = f"aside: {label}" if is_aside else _line.get()
    with _counting:
        _numbers[members, own] += 1
        folder = f"same/{digest(f'{[*members]} {own}')}/{_numbers[members, own]}"
    return Occasion(store, members, folder, is_aside)


# What processes write for each other.


def _packed(value: Any) -> str:
    """Returns a value of JSON as a short text, of which `_unpacked` makes it again."""
    return base64.b85encode(zlib.compress(json.dumps(value, default=str).encode(), 1)).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b85decode(text)))


def deciding(decide: Callable[[], Any], tell: Callable[[str], None], label: str) -> Any:
    """Returns or raises what `decide()` does, after `tell` got that as a text for `heard`.

    An error that is no SpmdError is told as a LaunchError, which says that `label` failed.
    """
    try:
        result = decide()
    except BaseException as error:
        told = error
        if not isinstance(error, SpmdError):
            failed = f"process {this_process()[0]} failed at {label}"
            told = LaunchError(failed, actual=_short(repr(error)))
        tell(_packed({"kind": type(told).__name__, **vars(told)}))
        raise
    tell(_packed([result]))
    return result


def heard(text: str) -> Any:
    """Returns the result in `text`, from another process's `deciding`; raises its SpmdError."""
    found = _unpacked(text)
    if not isinstance(found, dict):
        return found[0]
    error = getattr(errors, found.pop("kind"), LaunchError)("")
    vars(error).update(found)
    error.at(None)  # its message, of these fields
    raise error


def refuse_differences(found: Found, may_lack: bool = False) -> None:
    """Raises LaunchError if processes differ in the value of a name; it tells who has which.

    A name that only some processes have is compared among those if `may_lack`, else differs.
    """
    parts = {}
    for name in dict.fromkeys(name for what in found.values() for name in what):
        values = {
            process: what.get(name, "(not set)")
            for process, what in found.items()
            if name in what or not may_lack
        }
        if len(set(values.values())) > 1:
            parts[name] = who_has_what(values)
    if not parts:
        return
    fix = "start every process with the same program, files, flags and versions"
    if "checked" in parts:  # they are at different places: nothing else can be compared
        parts = {"what they do next": parts["checked"]}
        fix = (
            "let every process make the same calls, in one order and with arguments of the same "
            "shapes: pad or drop a last, smaller batch, and evaluate on all of them"
        )
    names = [*parts][:LISTED]
    texts = [f"{n}: {parts[n]}" for n in names] if len(parts) > 1 else [*parts.values()]
    more = [f"{len(parts) - LISTED} more"] if len(parts) > LISTED else []
    raise LaunchError(
        f"the processes of this job differ in {', '.join(names + more)}",
        actual="; ".join(texts),
        fix=fix,
    )


def who_has_what(values: Mapping[int, str]) -> str:
    """Returns the text `process 1: b; processes 0, 2: a`, with the most common value last."""
    having: dict[str, list[int]] = {}
    for process, value in values.items():
        having.setdefault(value, []).append(process)
    common = max(having, key=lambda value: len(having[value]))  # of equals the first: process 0's
    many = having.pop(common)
    rest = [f"process {process}: {_short(v)}" for v, those in having.items() for process in those]
    if len(rest) > LISTED:
        rest[LISTED:] = [f"{len(rest) - LISTED} more differ"]
    return "; ".join([*rest, f"{listed(many)}: {_short(common)}"])


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
"""Name -> (hash of a text without source locations, function that returns the text with them)."""


def check_same_program(
    label: str, texts: Texts, mesh: Mesh, processes: Sequence[int], more: Mapping[str, str]
) -> None:
    """Raises LaunchError unless texts, mesh, settings and `more` are the same on `processes`.

    Source locations do not count. The error shows the first different line of texts that differ.
    """
    what = {
        "checked": label,
        "number of devices": str(jax.device_count()),
        "mesh": str(mesh),
        "order of devices": digest(str(mesh.device_ids)),
        **settings(),
        **more,
    }
    hashes, first = {name: hash_ for name, (hash_, _) in texts.items()}, min(processes)

    def other_text(found: Found) -> tuple[str, int] | None:
        """Returns (name, process) of a text unlike that of the first process; None if all agree."""
        refuse_differences(
            {p: {k: v for k, v in w.items() if k not in hashes} for p, w in found.items()}
        )
        pairs = ((n, p) for n in hashes for p, w in found.items() if w[n] != found[first][n])
        return next(pairs, None)

    def refuse_lines(found: Found) -> None:
        pair = (_lines(found[p]["text"]) for p in (first, process))
        both = zip_longest(*pair, fillvalue=("nothing", None))
        spaces = ("spaces", None), ("other spaces", None)
        ours, theirs = next(((a, b) for a, b in both if a[0] != b[0]), spaces)
        raise LaunchError(
            f"the processes of this job differ in {name}, {label}",
            source=theirs[1] or ours[1],
            actual=f"process {process}: {_short(theirs[0])}; process {first}: {_short(ours[0])}",
            fix="let what the function closes over or asks for (a seed, a flag, a host's name, the "
            "order of a set) be equal on all processes, or an argument",
        )

    if other := judged(what | hashes, other_text, processes=processes):
        name, process = other
        has_it = this_process()[0] in (first, process)
        says = {"checked": label, "text": texts[name][1]() if has_it else ""}
        judged(says, refuse_lines, processes=processes)


_LOC = re.compile(r'\s*loc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\)')
_ALIAS, _FILE = re.compile(r"#loc\d*"), re.compile(r'"([^"]+)":(\d+):')


def without_locations(module: str) -> str:
    """Returns the text of an MLIR module without source locations, which differ between hosts."""
    lines = (line for line in module.splitlines() if not line.startswith("#loc"))
    return "\n".join(_LOC.sub("", line) for line in lines)


def _lines(module: str) -> list[tuple[str, str | None]]:
    """Returns (line without location, `file:line` of its source or None) for each line."""
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


def sources() -> dict[str, str]:
    """Returns `sources of <name> (hash)` -> hash of the file of each imported module of the user's.

    Paths do not count. Installed modules, Python's and this package's are left out.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith((".py", ".so")) or not is_users(file):
            continue
        if name == "__mp_main__":  # the program again, under the name that its workers use
            continue
        name = "the program" if name == "__main__" else name
        with contextlib.suppress(OSError):  # it is not there any more
            sha = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
            found[f"sources of {name} (hash)"] = sha
    return found


def check_same_sources() -> None:
    """Raises LaunchError on all processes if two have different files of one imported module.

    `spmd.initialize` has compared what was imported by then; this finds what came later. Installed
    modules do not count; one that some have not imported is compared among the others. All
    processes have to call it.
    """
    judged({"checked": "sources", **sources()}, partial(refuse_differences, may_lack=True))
