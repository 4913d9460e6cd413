"""Reads XLA's optimized HLO as text: which collectives run how often, and what they move.

The plan says what should be moved; this says what XLA made of it. Backends combine collectives,
make them asynchronous, and promote their dtypes (the CPU's all-reduce of bf16 is one of f32), so
the two are compared by kind and in bytes, not one by one.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.hlo.runs import Runs, array_bytes, arrays, elements, operands, source_of
from spmd.measure.hlo import (
    Instruction,
    Module,
    called,
    groups_of,
    integer,
    kind_of,
    names_of,
    op_name_of,
    parse_module_text,
)
from spmd.reshard.comm import wire_bytes

# All-reduces of optimized HLO that could be reduce-scatters: each device reads just its share.
#
# The backend for GPUs makes reduce-scatters of them, the CPU's does not. The TPU compiler makes
# them of some, and of a reduce-scatter over all chips of a slice it makes an all-reduce: what its
# text says is what runs.


def scattered_bytes(module: Module) -> dict[str, int]:
    """Name of an all-reduce -> bytes of its operands of which each device reads only a share.

    None of the TPU compiler's.
    """
    uses = {name: _uses_of(computation) for name, computation in module.computations.items()}
    found: dict[str, int] = {}
    for name, computation in module.computations.items():
        for instruction in computation:
            if instruction.opcode not in ("all-reduce", "all-reduce-start"):
                continue
            if _TILED in instruction.type:
                continue
            group = group_size(instruction, "all_reduce", module)
            for index, (dtype, shape) in enumerate(arrays(payload(instruction))):
                read = _read_elements(instruction.name, name, uses, index)
                if group > 1 and read is not None and read * group == math.prod(shape):
                    size = found.get(instruction.name, 0)
                    found[instruction.name] = size + array_bytes(dtype, shape)
    return found


_TILED = ":T("
"""A layout with tiles, which only the TPU compiler writes."""

_REARRANGES = {"bitcast", "bitcast-convert", "copy", "reshape", "transpose"}
"""Opcodes whose result has all elements of their operand, in some order."""


class _Uses(NamedTuple):
    """Who reads what in a computation."""

    # name -> each instruction that reads it and at which operand
    users: Mapping[str, Sequence[tuple[Instruction, int]]]
    parameters: Mapping[int, str]  # number -> name
    roots: frozenset[str]  # what the computation returns


def _uses_of(computation: Sequence[Instruction]) -> _Uses:
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for instruction in computation:
        for index, operand in enumerate(operands(instruction)):
            users.setdefault(operand, []).append((instruction, index))
    parameters = {integer(r"(\d+)", i.rest): i.name for i in computation if i.opcode == "parameter"}
    return _Uses(users, parameters, frozenset(i.name for i in computation if i.root))


def _read_elements(
    value: str, computation: str, uses: Mapping[str, _Uses], element: int = 0
) -> int | None:
    """The most elements of a value that any user slices from it, None where one reads it whole.

    Args:
      value: name of an array, or of a tuple.
      computation: where it is.
      uses: of every computation.
      element: which element of a tuple is meant.
    """
    # Follows a value through rearrangements, tuples and fusions to the slices at the end:
    #   %ar = all-reduce; %b = bitcast %ar; %f = fusion(%b), with dynamic-slice(param 0) of 2 in it
    # reads 2 elements. Of 8 in a group of 4 that is a share, and a backend may scatter it.
    here = uses[computation]
    if value in here.roots or not here.users.get(value):
        return None
    most = 0
    for user, index in here.users[value]:
        read: int | None = None
        if user.opcode == "dynamic-slice" and index == 0:
            read = math.prod(arrays(user.type)[0][1])
        elif user.opcode == "get-tuple-element":
            if integer(r"\bindex=(\d+)", user.rest) != element:
                continue
            read = _read_elements(user.name, computation, uses)
        elif user.opcode == "all-reduce-done":
            read = _read_elements(user.name, computation, uses, element)
        elif user.opcode in _REARRANGES:
            read = _read_elements(user.name, computation, uses)
        elif user.opcode == "fusion":
            (callee,) = names_of(user.rest, "calls")
            read = _read_elements(uses[callee].parameters[index], callee, uses)
        if read is None:
            return None
        most = max(most, read)
    return most or None


# The collectives that a computation issues, and from where to where each is under way.
#
# Most backends write a collective as one instruction, or as a start and a done. The TPU compiler
# has two more forms, both of them fusions:
#
#     all-reduce, then a slice                             a reduce-scatter, in one kernel
#     all-gather, then custom-call "AsyncCollectiveStart"  the start of a gather
#     all-gather beside a product                          the gather goes on while that computes
#     all-gather, then custom-call "AsyncCollectiveDone"   its end
#
# The last three belong together: it is one gather, of one channel, that is written in each of them.


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


class Reader:
    """Finds the collectives of a module's computations.

    Args:
      scattered: as of `scattered_bytes`; what is scattered in part is two collectives.
    """

    def __init__(self, module: Module, scattered: Mapping[str, int]) -> None:
        self.module, self.scattered = module, scattered
        # Names of gathers that start, and the channels of those: whatever else in a fusion has one
        # of these is such a gather on its way.
        self._starts = _marked(module, "AsyncCollectiveStart")
        self._dones = _marked(module, "AsyncCollectiveDone")
        self._channels = set(map(_channel, self._starts.values()))

    def issued(self, computation: Sequence[Instruction]) -> Iterator[HloCollective]:
        """Collectives of a computation that is no fusion's, in the order of the text, once each."""
        for place, instruction in enumerate(computation):
            to_host = "is_host_transfer=true" in instruction.rest
            if (kind := kind_of(instruction)) is not None and not to_host:
                end = _done(computation, place)
                yield from self._made(kind, place, end, instruction, instruction)
            elif instruction.opcode in ("fusion", "async-start"):
                yield from self._wrapped(computation, place)

    def _wrapped(self, computation: Sequence[Instruction], place: int) -> Iterator[HloCollective]:
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
            if kind == "all_reduce" and outer.opcode == "fusion":
                group = group_size(inner, kind, self.module)
                if group > 1 and _elements(outer.type) * group == _elements(payload(inner)):
                    kind = "reduce_scatter"  # it returns just one device's share of the sum
            yield from self._made(kind, place, end, inner, outer)

    def _made(
        self, kind: str, place: int, end: int | None, collective: Instruction, outer: Instruction
    ) -> Iterator[HloCollective]:
        """One collective, or two: of a combined all-reduce that is scattered in part."""
        group = group_size(collective, kind, self.module)
        received = sum(array_bytes(*array) for array in arrays(payload(collective)))
        if kind == "reduce_scatter" and kind_of(collective) == "all_reduce":
            received //= group
        scatter = self.scattered.get(collective.name, 0)
        parts = [("reduce_scatter", -(-scatter // group))] if scatter else []
        if scatter < received or not received:
            parts.append((kind, received - scatter))
        named = collective if op_name_of(collective) else outer
        op_name, source = op_name_of(named), source_of(named, self.module)
        for part, size in parts:
            sent = _sent(part, group, size)
            yield HloCollective(part, sent, 1, group, op_name, source, place, end)

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


# What arrives in a collective, and who takes part.


def payload(instruction: Instruction) -> str:
    """The type of what arrives: the type of a start also has its operands and some context.

    `all-reduce-start` has its result's type; the others have (operands, results, context...).
    """
    opcode = instruction.opcode
    if opcode == "send":
        return elements(instruction.type)[0]
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return instruction.type
    return elements(instruction.type)[1]


def group_size(instruction: Instruction, kind: str, module: Module) -> int:
    """Devices that exchange with one another in a collective of this kind."""
    # XLA lists devices (`groups_of`), or writes axes of a mesh, `mesh['a'=4,'b'=2] {'a'}`.
    rest = instruction.rest
    if kind == "collective_permute":
        return _largest_cycle(re.search(r"source_target_pairs=\{(\{.*?\})?\}", rest))
    if (named := re.search(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}", rest)) is not None:
        mesh = named[1]
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
        refs = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part) if part else sizes[name] for name, part in refs)
    return max(map(len, groups_of(instruction, module)), default=module.devices)


def _largest_cycle(pairs: re.Match[str] | None) -> int:
    """Devices in the largest set that source-target pairs connect."""
    connected: dict[str, set[str]] = {}  # device -> those that it is connected with
    for source, target in re.findall(r"\{(\d+),\s*(\d+)\}", (pairs and pairs[1]) or ""):
        both = connected.get(source, {source}) | connected.get(target, {target})
        connected |= dict.fromkeys(both, both)
    return max(map(len, connected.values()), default=1)


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
    counts = account.runs.counts()
    every = ((counts[name], c) for name, own in account.collectives.items() for c in own)
    return tuple(collective._replace(count=count) for count, collective in every if count)


def read_account(text: str, *, guess_trips: bool = True, scatter_slices: bool = False) -> Account:
    """The collectives of each computation, `count` being 1; for arguments see `hlo_collectives`."""
    module = parse_module_text(text)
    reader = Reader(module, scattered_bytes(module) if scatter_slices else {})
    found = {name: list(reader.issued(own)) for name, own in module.computations.items()}
    sent = {name: [collective.bytes for collective in own] for name, own in found.items()}
    return Account(module, found, Runs(module, sent, guess_trips=guess_trips))


def _sent(kind: str, group: int, received: int) -> int:
    # `wire_bytes` takes what a device puts in and what it gets; HLO states what it gets, of which a
    # reduce-scatter has put in a whole group's worth.
    if group == 1:
        return 0
    if kind == "collective_broadcast":
        return received
    sent = received * group if kind == "reduce_scatter" else received
    return wire_bytes(kind, group, sent, received)
