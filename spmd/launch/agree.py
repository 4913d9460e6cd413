"""Agreement: before processes compute together they compare what they are about to do.

They use the key-value store alone: where something differs, a device collective would hang.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from spmd.errors import LaunchError
from spmd.launch.store import Store, job_store, this_process

TIMEOUT_S = 600.0
"""How long processes wait for the slowest: compiling takes minutes, and hosts differ."""

LONGEST = 200
"""Characters of a value that a message shows."""

Found = Mapping[int, Mapping[str, str]]
"""Process -> what it says, by name."""

_calls: Counter[tuple[int, ...]] = Counter()


def check_same(
    what: Mapping[str, str],
    *,
    label: str = "flags",
    processes: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Compares a mapping with that of every other process; a no-op with one process.

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
    raise_json(judged(says, differences, processes=processes, timeout_s=timeout_s) or "")


def exchange(text: str, *, label: str, timeout_s: float = TIMEOUT_S) -> list[str]:
    """What every process says, in the order of their numbers; with one process, its own text.

    All processes have to call it, in the same order. No device takes part.

    Args:
      text: what this process says.
      label: what is told, for messages.
      timeout_s: seconds to wait for the slowest process.

    Raises:
      LaunchError: a process did not come in time, or came to something else.

    Example:
      >>> exchange("4 files", label="files found")
      ['4 files']
    """

    def listed(found: Found) -> str:
        return json.dumps([what["says"] for what in found.values()])

    outcome = judged({"checked": label, "says": text}, listed, timeout_s=timeout_s)
    said = [text] if outcome is None else json.loads(outcome)
    if isinstance(said, dict):
        raise LaunchError(**said)
    return [str(each) for each in said]


def from_first(text: str, *, label: str) -> str:
    """What process 0 says, on every process; as `exchange`."""
    return exchange(text, label=label)[0]


def judged(
    what: Mapping[str, str],
    judge: Callable[[Found], str],
    *,
    processes: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str | None:
    """What the first process makes of what all say, on each of them; None where one is alone.

    Args:
      what: what this process says, by name; `checked` names the occasion.
      judge: makes a text of what all say. It is not asked if they are at different occasions, or
        one did not come: then the text is `as_json` of the error.
      processes: as for `check_same`.
      timeout_s: as for `check_same`.
    """

    def outcome_of(found: Found) -> str:
        places = {process: {"checked": said["checked"]} for process, said in found.items()}
        return differences(places) or judge(found)

    joined = _joined(processes)
    return None if joined is None else gathered(*joined, what, outcome_of, timeout_s)


def _joined(
    processes: Sequence[int] | None = None,
) -> tuple[Store, str, tuple[int, ...], int] | None:
    """Store, a folder of it for one more call, members, this process; None if it is alone."""
    store = job_store()
    if store is None:
        return None
    me, count = this_process()
    members = tuple(sorted(processes)) if processes is not None else tuple(range(count))
    if len(members) < 2 or me not in members:
        return None
    # The call's number is part of the key, so that nobody reads an earlier outcome. All members
    # count alike, since they call in the same order. Groups count by themselves, because not every
    # process takes part in every group.
    _calls[members] += 1
    group = "all" if len(members) == count else "-".join(map(str, members))
    return store, f"same/{group}/{_calls[members]}", members, me


def gathered(
    store: Store,
    folder: str,
    members: Sequence[int],
    me: int,
    what: Mapping[str, str],
    outcome_of: Callable[[Found], str],
    timeout_s: float,
) -> str:
    """What the first member makes of what all say, on every one of them.

    Args:
      store: the job's store.
      folder: where in the store; another one for each call.
      members: the processes that take part.
      me: this process, one of them.
      what: what it says, with what is compared as `checked`.
      outcome_of: makes a text of what all say.
      timeout_s: seconds to wait for each other.
    """
    # Processes 0 1 2 with --steps 100 100 90:
    #   each writes same/all/1/<its number>; 0 waits for all three
    #   0 writes same/all/1/outcome: "process 2: 90; processes 0, 1: 100"
    #   all three read that, and raise the same error
    # Had 2 not come, the outcome would say so after `timeout_s`. The others wait half as long
    # again, so that 0's answer reaches them before their own patience ends.

    def missing(process: int) -> str:
        return as_json(
            LaunchError(
                f"process {process} did not come to compare {what['checked']} within "
                f"{timeout_s:g} s",
                fix="see what it does: its output, or the files of a watchdog",
            )
        )

    def outcome() -> str:
        found: dict[int, dict[str, str]] = {}
        for process in members:
            text = store.get(f"{folder}/{process}", timeout_s)
            if text is None:
                return missing(process)
            found[process] = json.loads(text)
        return outcome_of(found)

    store.put(f"{folder}/{me}", json.dumps(what))
    if me == members[0]:
        store.put(f"{folder}/outcome", outcome())
    read = store.get(f"{folder}/outcome", 1.5 * timeout_s)
    return missing(members[0]) if read is None else read


def differences(found: Found) -> str:
    """The differences between processes as the JSON of a `LaunchError`; empty if there are none.

    Args:
      found: process -> names and values.
    """
    names = list(dict.fromkeys(name for what in found.values() for name in what))
    parts = {}
    for name in names:
        values = {process: what.get(name, "(not set)") for process, what in found.items()}
        if len(set(values.values())) > 1:
            parts[name] = _who_has_what(values)
    if not parts:
        return ""
    if "checked" in parts:  # they are at different places: nothing else can be compared
        parts = {"what they do next": parts["checked"]}
    return as_json(
        LaunchError(
            f"the processes of this job differ in {', '.join(parts)}",
            actual="; ".join(
                text if len(parts) == 1 else f"{name}: {text}" for name, text in parts.items()
            ),
            fix="start every process with the same program, flags and versions",
        )
    )


def _who_has_what(values: Mapping[int, str]) -> str:
    """`process 1: b; processes 0, 2: a`: rarer values first, the most common last."""
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


def as_json(error: LaunchError) -> str:
    """An error as text that another process raises; see `raise_json`."""
    return json.dumps({"what": error.what, "actual": error.actual, "fix": error.fix})


def raise_json(outcome: str) -> None:
    """Raises the error that `as_json` made; an empty text is none."""
    if outcome:
        raise LaunchError(**json.loads(outcome))


def digest(text: str) -> str:
    """A short hash that is the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
