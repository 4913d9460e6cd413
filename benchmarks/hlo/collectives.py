"""Reads XLA's optimized HLO as text: which collectives run how often, and what they move.

The plan says what should be moved; this says what XLA made of it. Backends combine collectives,
make them asynchronous, and promote their dtypes (the CPU's all-reduce of bf16 is one of f32), so
the two are compared by kind and in bytes, not one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.hlo.issued import Issued, Reader
from benchmarks.hlo.read import source_of
from benchmarks.hlo.runs import Runs
from benchmarks.hlo.scatter import scattered_bytes
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.measure.hlo import Instruction, Module, op_name_of, parse_module_text
from spmd.reshard.comm import wire_bytes


class HloCollective(NamedTuple):
    """One collective."""

    # `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`, `collective_permute` or
    # `collective_broadcast`
    kind: str
    # bytes that one device sends in one execution, by the convention of
    # `spmd.reshard.comm.wire_bytes`; for a combined collective, of all its operands
    bytes: int
    # executions in one run (loops multiply)
    count: int  # type: ignore[assignment]  # hides tuple.count
    group_size: int  # devices that exchange with one another
    op_name: str  # the path of name scopes that it came from
    source: str  # `file.py:line (function)`, empty where XLA does not know
    place: int = 0  # where its computation issues it
    end: int | None = None  # where that waits for it; None of a synchronous one

    @property
    def flight(self) -> range:
        """The places of what is issued while it is under way."""
        return range(self.place + 1, self.place + 1 if self.end is None else self.end)


class Account(NamedTuple):
    """The collectives of a module."""

    module: Module
    # computation -> those that it issues, in the order of the text
    collectives: Mapping[str, list[HloCollective]]
    runs: Runs  # how often each computation runs; of a conditional only the branch that moves most


def hlo_collectives(
    text: str, *, guess_trips: bool = True, scatter_slices: bool = False
) -> tuple[HloCollective, ...]:
    """Every collective that the program runs, in the order of the text.

    Of a conditional's branches only the one that moves the most bytes counts.

    Args:
      text: `compiled.as_text("hlo")`, or the text of any optimized module.
      guess_trips: whether a loop whose trip count neither XLA states nor its counter tells is taken
        to run `UNKNOWN_TRIPS` times.
      scatter_slices: whether an all-reduce of which each device uses only its own slice is read
        as the reduce-scatter that other backends may make of it; for the text of the CPU's
        compiler, which makes none. Generous: what the slice's position depends on is not looked
        at. All-reduces in the TPU compiler's text stay: it has chosen what runs.

    Raises:
      ArgumentError: the text has no ENTRY computation, or, unless trips are guessed, a loop that
        communicates has an unknown trip count.
    """
    account = read_account(text, guess_trips=guess_trips, scatter_slices=scatter_slices)
    return tuple(counted(account))


def read_account(
    text: str,
    *,
    guess_trips: bool = True,
    scatter_slices: bool = False,
    unknown_trips: int = UNKNOWN_TRIPS,
) -> Account:
    """The collectives of each computation, `count` being 1; for arguments see `hlo_collectives`."""
    module = parse_module_text(text)
    scattered = scattered_bytes(module) if scatter_slices else {}
    reader = Reader(module)
    found = {
        name: [
            collective
            for issued in reader.issued(computation)
            for collective in _collectives(issued, computation[issued.place], module, scattered)
        ]
        for name, computation in module.computations.items()
    }
    sent = {name: [collective.bytes for collective in own] for name, own in found.items()}
    runs = Runs(module, sent, guess_trips=guess_trips, unknown_trips=unknown_trips)
    return Account(module, found, runs)


def counted(account: Account) -> Iterator[HloCollective]:
    """All collectives that run, in the order of the text, each with its count."""
    counts = account.runs.counts()
    for name, own in account.collectives.items():
        if counts[name]:
            yield from (collective._replace(count=counts[name]) for collective in own)


def _collectives(
    issued: Issued, outer: Instruction, module: Module, scattered: Mapping[str, int]
) -> Iterator[HloCollective]:
    """One collective, or two: of a combined all-reduce that is scattered in part."""
    kind, group, received = issued.kind, issued.group, issued.received
    scatter = scattered.get(issued.collective.name, 0)
    parts = [("reduce_scatter", -(-scatter // group))] if scatter else []
    if scatter < received or not received:
        parts.append((kind, received - scatter))
    named = issued.collective if op_name_of(issued.collective) else outer
    op_name, source = op_name_of(named), source_of(named, module)
    for part, size in parts:
        sent = _sent(part, group, size)
        yield HloCollective(part, sent, 1, group, op_name, source, issued.place, issued.end)


def _sent(kind: str, group: int, received: int) -> int:
    # `wire_bytes` takes what a device puts in and what it gets; HLO states what it gets, of which a
    # reduce-scatter has put in a whole group's worth.
    if group == 1:
        return 0
    if kind == "collective_broadcast":
        return received
    sent = received * group if kind == "reduce_scatter" else received
    return wire_bytes(kind, group, sent, received)
