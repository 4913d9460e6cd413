"""How often one run of an optimized HLO module runs each of its computations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.errors import ArgumentError
from spmd.hlo.text import Instruction, Module, names_of
from spmd.ir.control_flow import UNKNOWN_TRIPS


def executions(module: Module, into_fusions: bool = True) -> Counter[str]:
    """Computation -> how often one run of the module runs it, every branch counted."""
    calls = {
        name: [
            (callee, call.times)
            for instruction in computation
            if (call := _call(instruction, module, into_fusions)) is not None
            for callee in call.callees
        ]
        for name, computation in module.computations.items()
    }
    return _count(module.entry, calls)


def computations_run(
    module: Module, into_fusions: bool = True
) -> Iterator[tuple[list[Instruction], int]]:
    """Each computation that a run of the module reaches, and how often it runs."""
    counts = executions(module, into_fusions)
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
    # From the entry down: what a computation moves is its own plus what it calls, times trips. Of a
    # conditional only the branch that moves most is followed, so that bytes are those of one run,
    # at worst; the others count as if they never ran.
    moved: dict[str, int] = {}
    calls: dict[str, list[tuple[str, int]]] = {}

    def visit(name: str) -> int:
        if name in moved:
            return moved[name]
        total = sum(sent.get(name, ()))
        calls[name] = []
        for instruction in module.computations.get(name, ()):
            call = _call(instruction, module, into_fusions=True)
            if call is None:
                continue
            callees = [callee for callee in call.callees if communicates(callee)]
            if callees and not (call.known or guess_trips):
                raise _unknown_trips(instruction)
            if instruction.opcode == "conditional" and callees:
                callees = [max(callees, key=visit)]
            calls[name] += [(callee, call.times) for callee in callees]
            total += call.times * sum(map(visit, callees))
        moved[name] = total
        return total

    def communicates(name: str) -> bool:
        visit(name)
        return bool(sent.get(name) or calls.get(name))

    visit(module.entry)
    return _count(module.entry, calls)


def _unknown_trips(loop: Instruction) -> ArgumentError:
    return ArgumentError(
        f"the loop {loop.name} communicates, and how often it runs is unknown",
        actual=f"{loop.opcode}({loop.rest[:200]}",
        fix="write it with lax.scan or a lax.fori_loop of constant bounds",
    )


def _count(entry: str, calls: Mapping[str, Sequence[tuple[str, int]]]) -> Counter[str]:
    """Computation -> executions, given which ones each runs how often."""
    counts: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        counts[name] += times
        for callee, factor in calls.get(name, ()):
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


def _call(instruction: Instruction, module: Module, into_fusions: bool) -> _Call | None:
    opcode = instruction.opcode
    if opcode not in _CALLS or (opcode == "fusion" and not into_fusions):
        return None
    names = [name for key in _CALLS[opcode] for name in names_of(instruction.rest, key)]
    if opcode != "while":
        return _Call(names, 1, True)
    known = _known_trips(instruction)
    return _Call(
        names, _read_trips(instruction, module) if known is None else known, known is not None
    )


def _known_trips(loop: Instruction) -> int | None:
    """How often a while runs, as XLA says."""
    known = re.search(r'"?known_trip_count"?:\{"?n"?:"?(\d+)', loop.rest)
    return None if known is None else int(known[1])


def _read_trips(loop: Instruction, module: Module) -> int:
    """How often a while runs by `i < n` in its condition, `i` counting from 0, else a guess."""
    lines = [
        line
        for name in names_of(loop.rest, "condition")
        for line in _with_fusions(module.computations.get(name, ()), module)
    ]
    ends = {
        int(match[1])
        for line in lines
        if line.opcode == "constant" and (match := re.match(r"(\d+)\)", line.rest))
    }
    directions = {
        match[1]
        for line in lines
        if line.opcode == "compare" and (match := re.search(r"direction=(\w+)", line.rest))
    }
    if len(ends) != 1 or len(directions) != 1 or not directions <= {"LT", "NE", "LE", "GT"}:
        return UNKNOWN_TRIPS
    return ends.pop() + (directions == {"LE"})


def _with_fusions(
    computation: list[Instruction] | tuple[()], module: Module
) -> Iterator[Instruction]:
    for instruction in computation:
        yield instruction
        if instruction.opcode == "fusion":
            for name in names_of(instruction.rest, "calls"):
                yield from _with_fusions(module.computations.get(name, ()), module)
