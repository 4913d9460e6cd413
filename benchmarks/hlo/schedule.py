"""Reads the schedule of XLA's optimized HLO: which collectives run beside other work.

The text of a scheduled module lists instructions in the order in which they are issued. What stands
between the start and the done of a collective runs while it is under way. The TPU compiler writes
an estimate of cycles on most instructions; on collectives it writes none.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.hlo.collectives import Account, HloCollective, counted, read_account
from spmd.measure.hlo import Instruction, integer


class Schedule(NamedTuple):
    """The collectives of a module and the work beside them."""

    collectives: tuple[HloCollective, ...]  # all that run, in the order of the text
    hidden: tuple[bool, ...]  # of each, whether something is computed while it is under way
    # the compiler's estimate for all work but collectives in one run; 0 if it makes none
    cycles: int
    hidden_cycles: int  # of these, those during which at least one collective is under way

    @property
    def runs(self) -> int:
        """Collectives in one run."""
        return sum(c.count for c in self.collectives)

    @property
    def hidden_runs(self) -> int:
        """Collectives in one run that have something to compute meanwhile."""
        return sum(c.count for c, h in zip(self.collectives, self.hidden, strict=True) if h)


def read_schedule(text: str) -> Schedule:
    """The collectives of a scheduled module.

    Args:
      text: `compiled.as_text("hlo")`.

    Raises:
      ArgumentError: the text has no ENTRY computation.
    """
    account = read_account(text)
    counts = account.runs.counts()
    hidden: list[bool] = []
    for name, own in account.collectives.items():
        if own and counts[name]:
            busy = _busy(account.module.computations[name], own)
            hidden += (any(busy[place] for place in collective.flight) for collective in own)
    cycles, beside = _cycles(account)
    return Schedule(tuple(counted(account)), tuple(hidden), cycles, beside)


_COMPUTES = {"fusion", "dot", "convolution", "custom-call", "while", "reduce", "sort", "scatter"}
_NAMES_MEMORY = re.compile(r'\bcustom_call_target="(AllocateBuffer|ConcatBitcast)"')


def _busy(computation: Sequence[Instruction], own: Sequence[HloCollective]) -> list[bool]:
    """Of each instruction, whether it is arithmetic, and not just a collective or half of one."""
    halves = {place for collective in own for place in (collective.place, collective.end)}
    return [
        instruction.opcode in _COMPUTES
        and (place not in halves or estimated_cycles(instruction) > 0)
        and not _NAMES_MEMORY.search(instruction.rest)
        for place, instruction in enumerate(computation)
    ]


def _cycles(account: Account) -> tuple[int, int]:
    """Cycles of one run, and those beside a collective."""
    # Work that several collectives fly over counts once, and so does a loop that one flies over
    # and in which others fly: what a computation calls is beside a collective as a whole, or as
    # far as it is in itself.

    @functools.cache
    def of(name: str) -> tuple[int, int]:
        computation = account.module.computations[name]
        flown = {place for c in account.collectives[name] for place in c.flight}
        total = beside = 0
        inner = {call.instruction.name: call for call in account.runs.calls(name)}
        for place, instruction in enumerate(computation):
            cycles, within = estimated_cycles(instruction), 0
            if (call := inner.get(instruction.name)) is not None:
                cycles += call.times * sum(of(callee)[0] for callee in call.callees)
                within = call.times * sum(of(callee)[1] for callee in call.callees)
            total += cycles
            beside += cycles if place in flown else within
        return total, beside

    return of(account.module.entry)


def estimated_cycles(instruction: Instruction) -> int:
    """The compiler's estimate for an instruction outside of fusions; 0 if it makes none."""
    return integer(r'"estimated_cycles":"(\d+)"', instruction.rest)
