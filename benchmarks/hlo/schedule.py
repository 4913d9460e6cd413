"""Reads the schedule of XLA's optimized HLO: which collectives run beside arithmetic.

The text of a scheduled module lists instructions in the order in which they are issued. A
collective is asynchronous where it is a start and a done; what stands between the two runs while
it is under way. TPUs write `async-collective-start.N` and `-done.N` around fusions that carry a
gather along (all with the gather's channel), and an estimate of cycles on most instructions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.hlo.runs import computations_run
from spmd.measure.hlo import Instruction, Module, kind_of, parse_module_text


class Flight(NamedTuple):
    """One collective of a schedule.

    Attributes:
      kind: as in `benchmarks.hlo.collectives.HloCollective`.
      name: of the instruction, or of its start.
      count: executions in one run.
      is_async: whether it is a start and a done.
      between: how many computing instructions lie between the two.
      cycles: the compiler's estimate for these in one execution; 0 if it makes none.
    """

    kind: str
    name: str
    count: int  # type: ignore[assignment]  # hides tuple.count
    is_async: bool
    between: int
    cycles: int


class Schedule(NamedTuple):
    """All collectives of a module in the order of their issue, and the cycles of all arithmetic."""

    flights: tuple[Flight, ...]
    cycles: int

    @property
    def runs(self) -> int:
        """Collectives in one run."""
        return sum(f.count for f in self.flights)

    @property
    def async_runs(self) -> int:
        """Asynchronous collectives in one run that have something to compute meanwhile."""
        return sum(f.count for f in self.flights if f.is_async and f.between)

    @property
    def hidden_cycles(self) -> int:
        """Cycles of arithmetic during which a collective is under way.

        Where several are under way at once, the same arithmetic counts for each of them.
        """
        return sum(f.cycles * f.count for f in self.flights)


def read_schedule(text: str) -> Schedule:
    """The collectives of a scheduled module.

    Args:
      text: `compiled.as_text("hlo")`.

    Raises:
      ArgumentError: the text has no ENTRY computation.
    """
    module = parse_module_text(text)
    flights: list[Flight] = []
    cycles = 0
    for computation, runs in computations_run(module, into_fusions=False):
        flights += _flights(computation, runs, module)
        cycles += runs * sum(map(_cycles, computation))
    return Schedule(tuple(flights), cycles)


def _flights(computation: Sequence[Instruction], count: int, module: Module) -> Iterator[Flight]:
    for place, instruction in enumerate(computation):
        kind = _kind(instruction, module)
        if kind is None:
            continue
        end = _done(instruction, computation, place)
        inside = computation[place + 1 : end] if end else ()
        busy = [i for i in inside if _computes(i)]
        cycles = sum(map(_cycles, busy))
        yield Flight(kind, instruction.name, count, end is not None, len(busy), cycles)


def _kind(instruction: Instruction, module: Module) -> str | None:
    """The kind of a collective that is issued here, None for anything else."""
    if (kind := kind_of(instruction)) is not None:
        return kind
    is_named = instruction.name.startswith("async-collective-start")
    is_start = is_named or instruction.opcode == "async-start"
    if is_start and (callee := re.search(r"\bcalls=%?([\w.-]+)", instruction.rest)):
        inner = module.computations.get(callee[1], ())
        return next(filter(None, map(kind_of, inner)), "all_gather")
    return None


def _done(start: Instruction, computation: Sequence[Instruction], place: int) -> int | None:
    """Where the collective that starts at `place` is waited for; None if it is synchronous."""
    # Most backends: `%s = all-gather-start(...)`, later `all-gather-done(%s)`. TPUs: two fusions of
    # one number, `async-collective-start.3` and `async-collective-done.3`, joined by name alone.
    rest = enumerate(computation[place + 1 :], place + 1)
    if start.name.startswith("async-collective-start"):
        wanted = start.name.replace("-start", "-done")
        return next((i for i, other in rest if other.name == wanted), None)
    if not start.opcode.endswith("-start") and start.opcode != "send":
        return None
    done = re.compile(rf"%?{re.escape(start.name)}[\s,)]")
    ends = (i for i, other in rest if other.opcode.endswith("-done") and done.match(other.rest))
    return next(ends, None)


_COMPUTES = {"fusion", "dot", "convolution", "custom-call", "while", "reduce", "sort", "scatter"}


def _computes(instruction: Instruction) -> bool:
    """Whether an instruction is arithmetic, and not the other half of a collective."""
    return instruction.opcode in _COMPUTES and not instruction.name.startswith("async-collective")


def _cycles(instruction: Instruction) -> int:
    match = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
    return int(match[1]) if match and _computes(instruction) else 0
