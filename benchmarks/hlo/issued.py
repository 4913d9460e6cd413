"""The collectives that a computation issues, and from where to where each is under way.

Most backends write a collective as one instruction, or as a start and a done. The TPU compiler has
two more forms, both of them fusions:

    all-reduce, then a slice                             a reduce-scatter, in one kernel
    all-gather, then custom-call "AsyncCollectiveStart"  the start of a gather
    all-gather beside a product                          the gather goes on while that computes
    all-gather, then custom-call "AsyncCollectiveDone"   its end

The last three belong together: it is one gather, of one channel, that is written in each of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.hlo.groups import group_size, payload
from benchmarks.hlo.read import array_bytes, arrays, operands
from spmd.measure.hlo import Instruction, Module, called, integer, kind_of


class Issued(NamedTuple):
    """A collective that a computation issues."""

    kind: str  # `all_gather`, `all_reduce`, ...: of what runs, whatever it is written as
    place: int  # where in the computation; it is under way from behind that
    end: int | None  # where it is waited for; None if it is synchronous
    # the instruction that says what is exchanged: that at `place`, or one inside
    collective: Instruction
    group: int  # devices that exchange with one another
    received: int  # bytes that arrive at one device


class Reader:
    """Finds the collectives of a module's computations."""

    def __init__(self, module: Module) -> None:
        self.module = module
        # Names of gathers that start, and the channels of those: whatever else in a fusion has one
        # of these is such a gather on its way.
        self._starts = _marked(module, "AsyncCollectiveStart")
        self._dones = _marked(module, "AsyncCollectiveDone")
        self._channels = set(map(_channel, self._starts.values()))

    def issued(self, computation: Sequence[Instruction]) -> Iterator[Issued]:
        """Collectives of a computation that is no fusion's, in the order of the text."""
        for place, instruction in enumerate(computation):
            to_host = "is_host_transfer=true" in instruction.rest
            if (kind := kind_of(instruction)) is not None and not to_host:
                end = _done(computation, place)
                yield self._made(kind, place, end, instruction, payload(instruction))
            elif instruction.opcode in ("fusion", "async-start"):
                yield from self._wrapped(computation, place)

    def _wrapped(self, computation: Sequence[Instruction], place: int) -> Iterator[Issued]:
        """The collectives that a fusion, or the start of a wrapped computation, issues."""
        outer = computation[place]
        end = _done(computation, place) if outer.opcode == "async-start" else None
        for inner in self._inside(outer):
            kind = kind_of(inner)
            if kind is None:
                continue
            if inner.name in self._starts:
                end = self._fused_done(computation, place, _channel(inner))
            elif outer.opcode == "fusion" and _channel(inner) in self._channels:
                continue
            type_ = payload(inner)
            if kind == "all_reduce" and self._keeps_a_share(outer, inner):
                kind = "reduce_scatter"
            yield self._made(kind, place, end, inner, type_)

    def _made(
        self, kind: str, place: int, end: int | None, collective: Instruction, type_: str
    ) -> Issued:
        group = group_size(collective, kind, self.module)
        received = sum(array_bytes(*array) for array in arrays(type_))
        if kind == "reduce_scatter" and kind_of(collective) == "all_reduce":
            received //= group
        return Issued(kind, place, end, collective, group, received)

    def _keeps_a_share(self, outer: Instruction, reduce: Instruction) -> bool:
        """Whether a fusion returns just one device's share of a sum."""
        group = group_size(reduce, "all_reduce", self.module)
        returned = outer.opcode == "fusion" and _elements(outer.type)
        return group > 1 and returned * group == _elements(payload(reduce))

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        for inner in called(instruction, self.module):
            yield inner
            if inner.opcode == "fusion":
                yield from self._inside(inner)

    def _fused_done(
        self, computation: Sequence[Instruction], place: int, channel: int
    ) -> int | None:
        """Where a fusion waits for the gather of a channel that starts at `place`."""
        for end, instruction in enumerate(computation[place + 1 :], place + 1):
            if instruction.opcode == "fusion":
                names = {i.name for i in self._inside(instruction) if i.name in self._dones}
                if any(_channel(self._dones[name]) == channel for name in names):
                    return end
        return None


def _marked(module: Module, target: str) -> dict[str, Instruction]:
    """The collectives that are operands of custom calls to a target, by name."""
    found = {}
    for computation in module.computations.values():
        names = [
            operand
            for instruction in computation
            if f'custom_call_target="{target}"' in instruction.rest
            for operand in operands(instruction)
        ]
        for instruction in computation if names else ():
            if instruction.name in names and kind_of(instruction) is not None:
                found[instruction.name] = instruction
    return found


def _channel(collective: Instruction) -> int:
    return integer(r"\bchannel_id=(\d+)", collective.rest)


def _elements(type_: str) -> int:
    return sum(math.prod(shape) for _, shape in arrays(type_))


def _done(computation: Sequence[Instruction], place: int) -> int | None:
    """Where what starts at `place` is waited for; None if it is no start."""
    start = computation[place]
    if not start.opcode.endswith("-start") and start.opcode != "send":
        return None
    names = {start.name}  # a start and the updates that hand it on
    for end, instruction in enumerate(computation[place + 1 :], place + 1):
        if instruction.opcode.endswith(("-done", "-update")):
            first = re.match(r"%?([\w.-]+)", instruction.rest)
            if first and first[1] in names:
                if instruction.opcode.endswith("-done"):
                    return end
                names.add(instruction.name)
    return None
