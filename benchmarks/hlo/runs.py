"""How often one run of an optimized HLO module runs each of its computations."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.errors import ArgumentError
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.measure.hlo import Instruction, Module, names_of


def computations_run(
    module: Module, into_fusions: bool = True
) -> Iterator[tuple[list[Instruction], int]]:
    """Each computation that a run of the module reaches, and how often it runs.

    Every branch of a conditional counts.
    """

    def calls(name: str) -> list[tuple[str, int]]:
        return [
            (callee, call.times)
            for _, call in _calls_in(module, name, into_fusions)
            for callee in call.callees
        ]

    counts = _count(module.entry, calls)
    return ((found, counts[name]) for name, found in module.computations.items() if counts[name])


def communication(
    module: Module, sent: Mapping[str, Sequence[int]], guess_trips: bool
) -> Counter[str]:
    """Computation -> how often it communicates: of branches, the one that moves the most.

    Args:
      module: the module.
      sent: computation -> bytes that each collective of its own sends in one execution.
      guess_trips: whether loops without a trip count from XLA may communicate.

    Raises:
      ArgumentError: unless trips are guessed, such a loop communicates.
    """
    # What a computation moves is its own plus what it calls, times trips. Of a conditional only the
    # branch that moves most is followed, so that bytes are those of one run, at worst; the others
    # count as if they never ran.

    @functools.cache
    def moved(name: str) -> tuple[int, int]:
        """Bytes and collectives of one execution."""
        size, number = sum(sent.get(name, ())), len(sent.get(name, ()))
        for callee, times in calls(name):
            size += times * moved(callee)[0]
            number += moved(callee)[1]
        return size, number

    @functools.cache
    def calls(name: str) -> list[tuple[str, int]]:
        found = []
        for instruction, call in _calls_in(module, name):
            callees = call.callees
            if not (call.known or guess_trips) and any(moved(callee)[1] for callee in callees):
                raise ArgumentError(
                    f"the loop {instruction.name} communicates, and how often it runs is unknown",
                    actual=f"{instruction.opcode}({instruction.rest[:200]}",
                    fix="write it with lax.scan or a lax.fori_loop of constant bounds",
                )
            if instruction.opcode == "conditional":
                callees = [max(callees, key=moved)]
            found += [(callee, call.times) for callee in callees]
        return found

    return _count(module.entry, calls)


def _count(entry: str, calls: Callable[[str], Sequence[tuple[str, int]]]) -> Counter[str]:
    """Computation -> executions, given which ones each runs how often."""
    counts: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        counts[name] += times
        for callee, factor in calls(name):
            visit(callee, times * factor)

    visit(entry, 1)
    return counts


_CALLS = {
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls",),
    "custom-call": ("called_computations",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "while": ("condition", "body"),
}
"""Opcode -> the attributes that name computations which it runs as a part of the program."""


class _Call(NamedTuple):
    """The computations that an instruction runs, how often, and whether XLA states that number."""

    callees: list[str]
    times: int
    known: bool


def _calls_in(
    module: Module, name: str, into_fusions: bool = True
) -> Iterator[tuple[Instruction, _Call]]:
    """The instructions of a computation that run other ones."""
    for instruction in module.computations.get(name, ()):
        opcode = instruction.opcode
        if opcode not in _CALLS or (opcode == "fusion" and not into_fusions):
            continue
        names = [n for key in _CALLS[opcode] for n in names_of(instruction.rest, key)]
        trips: int | None = 1
        if opcode == "while":  # XLA states how often it runs, or does not
            stated = re.search(r'"?known_trip_count"?:\{"?n"?:"?(\d+)', instruction.rest)
            trips = int(stated[1]) if stated else None
        times = _read_trips(instruction, module) if trips is None else trips
        yield instruction, _Call(names, times, trips is not None)


def _read_trips(loop: Instruction, module: Module) -> int:
    """How often a while runs by `i < n` in its condition, `i` counting from 0, else a guess."""
    (condition,) = names_of(loop.rest, "condition")
    ends, directions = set(), set()
    for line in _with_fusions(condition, module):
        if line.opcode == "constant" and (match := re.match(r"(\d+)\)", line.rest)):
            ends.add(int(match[1]))
        if line.opcode == "compare" and (match := re.search(r"direction=(\w+)", line.rest)):
            directions.add(match[1])
    if len(ends) != 1 or len(directions) != 1 or not directions <= {"LT", "NE", "LE", "GT"}:
        return UNKNOWN_TRIPS
    return ends.pop() + (directions == {"LE"})


def _with_fusions(computation: str, module: Module) -> Iterator[Instruction]:
    for instruction in module.computations.get(computation, ()):
        yield instruction
        if instruction.opcode == "fusion":
            for name in names_of(instruction.rest, "calls"):
                yield from _with_fusions(name, module)
