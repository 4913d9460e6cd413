"""Reads XLA's optimized HLO as text: which collectives run how often, and what they move.

The plan says what should be moved; this says what XLA made of it. Backends combine collectives,
make them asynchronous, and promote their dtypes (the CPU's all-reduce of bf16 is one of f32), so
the two are compared by kind and in bytes, not one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.hlo.groups import group_size, payload
from benchmarks.hlo.runs import communication
from benchmarks.hlo.scatter import scattered_bytes
from spmd.measure.hlo import (
    Instruction,
    Module,
    array_bytes,
    arrays,
    kind_of,
    op_name_of,
    parse_module_text,
    source_of,
)
from spmd.reshard.comm import wire_bytes


class HloCollective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`, `collective_permute` or
        `collective_broadcast`.
      bytes: bytes that one device sends in one execution, by the convention of
        `spmd.reshard.comm.wire_bytes`; for a combined collective, of all its operands.
      count: executions in one run (loops multiply).
      group_size: devices that exchange with one another.
      op_name: the path of name scopes that it came from.
      source: `file.py:line (function)`, empty where XLA does not know.
    """

    kind: str
    bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    group_size: int
    op_name: str
    source: str


def hlo_collectives(
    text: str, *, guess_trips: bool = True, scatter_slices: bool = False
) -> tuple[HloCollective, ...]:
    """Every collective that the program runs, in the order of the text.

    Of a conditional's branches only the one that moves the most bytes counts.

    Args:
      text: `compiled.as_text("hlo")`, or the text of any optimized module.
      guess_trips: whether a loop whose trip count XLA does not state is read from `i < n` in its
        condition, else taken to run `UNKNOWN_TRIPS` times.
      scatter_slices: whether an all-reduce of which each device uses only its own slice is read
        as the reduce-scatter that the backends for GPU and TPU make of it; the CPU's does not.
        Generous: what the slice's position depends on is not looked at.

    Raises:
      ArgumentError: the text has no ENTRY computation, or, unless trips are guessed, a loop that
        communicates has an unknown trip count.
    """
    module = parse_module_text(text)
    scattered = scattered_bytes(module) if scatter_slices else {}
    own = {
        name: [
            found
            for instruction in computation
            for found in _collectives(instruction, module, scattered)
        ]
        for name, computation in module.computations.items()
    }
    sent = {name: [collective.bytes for collective in found] for name, found in own.items()}
    counts = communication(module, sent, guess_trips)
    return tuple(
        found._replace(count=counts[name])
        for name in module.computations
        if counts[name]
        for found in own[name]
    )


def _collectives(
    instruction: Instruction, module: Module, scattered: Mapping[str, int]
) -> Iterator[HloCollective]:
    """The collectives of an instruction: two, if a combined all-reduce is scattered in part."""
    kind = kind_of(instruction)
    to_host = instruction.opcode == "send" and "is_host_transfer=true" in instruction.rest
    if kind is None or to_host:
        return
    group = group_size(instruction, kind, module)
    received = sum(array_bytes(dtype, shape) for dtype, shape in arrays(payload(instruction)))
    scatter = scattered.get(instruction.name, 0)
    parts = [("reduce_scatter", -(-scatter // group))] if scatter else []
    if scatter < received or not received:
        parts.append((kind, received - scatter))
    op_name, source = op_name_of(instruction), source_of(instruction, module)
    for part, size in parts:
        yield HloCollective(part, _sent(part, group, size), 1, group, op_name, source)


def _sent(kind: str, group: int, received: int) -> int:
    # `wire_bytes` takes what a device puts in and what it gets; HLO states what it gets, of which a
    # reduce-scatter has put in a whole group's worth.
    if group == 1:
        return 0
    if kind == "collective_broadcast":
        return received
    sent = received * group if kind == "reduce_scatter" else received
    return wire_bytes(kind, group, sent, received)
