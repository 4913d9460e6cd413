"""How often one run of an optimized HLO module runs each of its computations."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.hlo.trips import Loops
from spmd.errors import ArgumentError
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.measure.hlo import Instruction, Module, names_of

_CALLS = {
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls",),
    "custom-call": ("called_computations",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "while": ("condition", "body"),
}
"""Opcode -> the attributes that name computations which it runs as a part of the program."""


_WRAPPERS = {"fusion", "async-start"}
"""Opcodes of one kernel, or of one transfer, that is written as a computation."""


class Call(NamedTuple):
    """Computations that an instruction runs, and how often it runs each."""

    instruction: Instruction
    callees: list[str]
    times: int


class Runs:
    """What one run of a module runs.

    Args:
      sent: computation -> bytes that each collective of its own sends in one execution. Of a
        conditional's branches only the one that moves the most is followed, so that bytes are those
        of one run, at worst. None: every branch counts.
      guess_trips: whether loops whose trip count nobody knows may communicate.
      unknown_trips: how often such a loop is taken to run.
      into_wrappers: whether the computations of fusions and of asynchronous starts are run, too.
    """

    def __init__(
        self,
        module: Module,
        sent: Mapping[str, list[int]] | None = None,
        *,
        guess_trips: bool = True,
        unknown_trips: int = UNKNOWN_TRIPS,
        into_wrappers: bool = False,
    ) -> None:
        self.module, self.sent, self.guess_trips = module, sent, guess_trips
        self.unknown_trips = unknown_trips
        self.opcodes = set(_CALLS) if into_wrappers else set(_CALLS) - _WRAPPERS
        self._loops = Loops(module)
        self.calls = functools.cache(self._calls)
        self._moved = functools.cache(self._moves)

    def counts(self) -> Counter[str]:
        """Computation -> executions.

        Raises:
          ArgumentError: unless trips are guessed, a loop of unknown trips communicates.
        """
        counts: Counter[str] = Counter()

        def visit(name: str, times: int) -> None:
            counts[name] += times
            for call in self.calls(name):
                for callee in call.callees:
                    visit(callee, times * call.times)

        visit(self.module.entry, 1)
        return counts

    def _calls(self, name: str) -> list[Call]:
        """The calls that a computation makes in one execution."""
        found = []
        for instruction in self.module.computations.get(name, ()):
            if instruction.opcode not in self.opcodes:
                continue
            keys = _CALLS[instruction.opcode]
            callees = [callee for key in keys for callee in names_of(instruction.rest, key)]
            times: int | None = 1
            if instruction.opcode == "while":
                times = self._loops.trips(instruction, name)
            if times is None:
                self._check(instruction, callees)
            if instruction.opcode == "conditional" and self.sent is not None:
                callees = [max(callees, key=self._moved)]
            found.append(Call(instruction, callees, self.unknown_trips if times is None else times))
        return found

    def _check(self, loop: Instruction, callees: list[str]) -> None:
        if not self.guess_trips and any(self._moved(callee)[1] for callee in callees):
            raise ArgumentError(
                f"the loop {loop.name} communicates, and how often it runs is unknown",
                actual=f"{loop.opcode}({loop.rest[:200]}",
                fix="write it with lax.scan or a lax.fori_loop of constant bounds",
            )

    def _moves(self, name: str) -> tuple[int, int]:
        """Bytes and collectives of one execution: its own and those that it calls, times trips."""
        own = (self.sent or {}).get(name, [])
        size, number = sum(own), len(own)
        for call in self.calls(name):
            for callee in call.callees:
                size += call.times * self._moved(callee)[0]
                number += self._moved(callee)[1]
        return size, number
