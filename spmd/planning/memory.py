"""Memory of one device, predicted from the local program: what is stored, from when until when.

    before: %3 = dot %1, %2; %4 = exp %3; %5 = dot %4, %2     (%1 dies at the first dot)
    after:  %3 stored at 0..1, %4 in the place of %3 at 1..2, %5 a result

Time is the number of an op in program order, regions' ops before the op that holds them. Rules:
values computed inside their readers take none (`spmd.planning.fusion`), an elementwise op writes
over an operand of the same size that nobody reads again, a loop's carries lie in one place as long
as the loop runs, and donated arguments are overwritten by the results of the same type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.ir.program import Op, Program, Region, Value, free_values
from spmd.planning.fusion import Role, role


class Buffer(NamedTuple):
    """Memory that one value takes.

    Attributes:
      value: whose.
      op: the op that makes it.
      bytes: on one device.
      start, end: numbers of the first op and of the last op during which it is held.
    """

    value: Value
    op: Op
    bytes: int
    start: int
    end: int

    @property
    def name(self) -> str:
        """The op and the user's source line."""
        return f"{self.op.name.partition('.')[2]} {self.op.loc.source}".strip()


class MemoryUse(NamedTuple):
    """What a program holds, and when.

    Attributes:
      arguments: bytes of its arguments, held throughout.
      results: bytes of its results.
      aliased: of these, what lies in donated arguments.
      temporary: the most bytes that everything in between takes at once.
      peak_at: number of the op at which that is.
      buffers: everything in between, in order of `start`.
      length: number of ops.
    """

    arguments: int
    results: int
    aliased: int
    temporary: int
    peak_at: int
    buffers: tuple[Buffer, ...]
    length: int

    @property
    def peak(self) -> int:
        """Bytes of one device in all."""
        return self.arguments + self.results - self.aliased + self.temporary

    def at_peak(self) -> tuple[Buffer, ...]:
        """What is held at the peak besides arguments and results, largest first."""
        held = [b for b in self.buffers if b.start <= self.peak_at <= b.end]
        return tuple(sorted(held, key=lambda b: -b.bytes))


def peak_memory(
    program: Program, donated: Sequence[int] = (), widens_halves: bool = False
) -> MemoryUse:
    """Predicts what one device holds.

    Args:
      program: a local program.
      donated: positions of the arguments whose memory may be overwritten.
      widens_halves: whether 16-bit floats in between are held as 32-bit ones, as XLA does on CPUs.
    """
    uses = _Uses(program)
    return _Simulation(uses, _aliases(program, donated), widens_halves).run()


def stored_values(program: Program) -> frozenset[Value]:
    """Values that get memory of their own; the others are computed where they are read."""
    stored = _Uses(program).stored
    return frozenset(value for value, is_stored in enumerate(stored) if is_stored)


def _aliases(program: Program, donated: Sequence[int]) -> dict[int, int]:
    """Result -> the donated argument that it lies in: the first free one of its type, as in jax."""
    types, body = program.types, program.body
    free: dict[object, list[int]] = {}
    for position in donated:
        free.setdefault(types[body.args[position]], []).append(position)
    found = {}
    for position, value in enumerate(body.results):
        if places := free.get(types[value]):
            found[position] = places.pop(0)
    return found


_NEVER = -1


class _Uses:
    """Backwards over a program: who is stored, and until when.

    Attributes:
      stored: whether a value has memory of its own.
      last: the number of the last op that reads it, `_NEVER` if none does.
      root: the value in whose memory an alias lies.
      numbers: first result (or op) -> (number of the first op inside, own number).
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        count = len(program.types)
        self.stored = [False] * count
        self.last = [_NEVER] * count
        self.readers = [0] * count
        self.needed = [False] * count
        self.root = list(range(count))
        self.length = sum(1 for _ in program.walk())
        self.clock = self.length
        for value in program.body.results:
            self.read(value, self.length, 1, True)
        self.region(program.body)

    def read(self, value: Value, when: int, readers: int, needed: bool) -> None:
        if when > self.last[value]:
            self.last[value] = when
        self.readers[value] += readers
        if needed:
            self.needed[value] = True

    def region(self, region: Region) -> None:
        last, readers, needed, stored = self.last, self.readers, self.needed, self.stored
        for op in reversed(region.ops):
            self.clock -= 1
            kind = op.kind
            what = role(kind)
            if what == Role.REGION:
                self.control_flow(op)
                continue
            if not op.results:
                for value in op.operands:
                    self.read(value, self.clock, 1, True)
                continue
            result = op.results[0]
            if what <= Role.ALIAS:
                until = last[result]
                if until == _NEVER:
                    continue
                if what == Role.ALIAS:
                    for value, alias in zip(op.operands, op.results, strict=True):
                        if last[alias] != _NEVER:
                            self.root[alias] = value
                            self.read(value, last[alias], readers[alias], needed[alias])
                    continue
                if not needed[result] and (what == Role.INSIDE or readers[result] == 1):
                    count = min(readers[result], 2)
                    for value in op.operands:
                        if until > last[value]:
                            last[value] = until
                        readers[value] += count
                    continue
            elif all([last[v] == _NEVER for v in op.results]):
                continue
            if kind.name == "stablehlo.constant":  # it comes with the executable
                continue
            for value in op.results:
                stored[value] = True
            now = self.clock
            for value in op.operands:
                if now > last[value]:
                    last[value] = now
                readers[value] += 1
                if what == Role.CALL:
                    needed[value] = True
            if what == Role.UPDATE:
                for value in op.operands[: len(op.results)]:
                    needed[value] = True

    def control_flow(self, op: Op) -> None:
        """A loop's carries and captures are held while it runs; so are a branch's captures."""
        end = self.clock
        inside = sum(1 for region in op.regions for _ in _walk(region))
        start = end - inside
        is_loop = op.name == "stablehlo.while"
        for i, value in enumerate(op.operands):
            if is_loop and is_untouched(op, i):
                self.root[op.results[i]] = value
                until = max(end, self.last[op.results[i]])
                self.read(value, until, 2, True)
            else:
                self.stored[op.results[i]] = is_loop
                self.read(value, start, 1, True)
        if not is_loop:
            for value in op.results:
                self.stored[value] = self.last[value] != _NEVER
        for region in op.regions:
            for value in free_values(region):
                self.read(value, end, 2, True)
        for region in reversed(op.regions):
            for value in region.results:
                self.read(value, self.clock, 1, True)
            self.region(region)


def _walk(region: Region) -> Sequence[Op]:
    found: list[Op] = []
    for op in region.ops:
        for inner in op.regions:
            found += _walk(inner)
        found.append(op)
    return found


def is_untouched(loop: Op, position: int) -> bool:
    """Whether a loop hands a carry on as it is."""
    body = loop.regions[1]
    return body.results[position] == body.args[position]


class _Simulation:
    """Forwards over a program: allocates, frees, and remembers the most that was held."""

    def __init__(self, uses: _Uses, aliases: dict[int, int], widens_halves: bool) -> None:
        self.widened = ("bf16", "f16") if widens_halves else ()
        self.uses = uses
        self.program = uses.program
        self.types = uses.program.types
        self.aliases = aliases
        self.held = self.most = self.most_at = 0
        self.clock = 0
        self.buffers: list[Buffer] = []
        self.dying: dict[int, list[tuple[Value, int]]] = {}
        self.homes: dict[Value, tuple[int, int]] = {}
        self.at_home: set[Value] = set()

    def run(self) -> MemoryUse:
        program, types, last = self.program, self.types, self.uses.last
        body = program.body
        for position, value in enumerate(body.results):
            argument = self.aliases.get(position)
            free_from = -1 if argument is None else last[body.args[argument]]
            self.homes.setdefault(self.root(value), (free_from, self.uses.length))
            if argument is not None:
                self.at_home.add(body.args[argument])
        self.region(body)
        sizes = [types[v].bytes for v in body.results]
        return MemoryUse(
            sum(types[v].bytes for v in body.args),
            sum(sizes),
            sum(sizes[position] for position in self.aliases),
            self.most,
            self.most_at,
            tuple(self.buffers),
            self.uses.length,
        )

    def root(self, value: Value) -> Value:
        root = self.uses.root
        while root[value] != value:
            value = root[value]
        return value

    def region(self, region: Region) -> None:
        stored = self.uses.stored
        for op in region.ops:
            if op.regions:
                self.control_flow(op)
            else:
                what = role(op.kind)
                if what == Role.UPDATE and self.is_at_home(op):
                    self.at_home.update(op.results)
                else:
                    for value in op.results:
                        if stored[value]:
                            self.make(op, value, what <= Role.UPDATE)
            self.free()
            self.clock += 1

    def is_at_home(self, op: Op) -> bool:
        """Whether an update writes over an argument's or a carry's memory that is free by now."""
        last = self.uses.last
        roots = [self.root(value) for value in op.operands[: len(op.results)]]
        return all(root in self.at_home and last[root] <= self.clock for root in roots)

    def make(self, op: Op, value: Value, over_operand: bool) -> None:
        """Allocates a value, in the place of one that dies here if the op may write over it."""
        now, type_ = self.clock, self.types[value]
        size = type_.bytes * (2 if type_.dtype in self.widened else 1)
        home = self.homes.get(value)
        if home is not None:
            free_from, end = home
            if free_from < now or (free_from == now and over_operand):
                return
        else:
            end = max(self.uses.last[value], now)
        if over_operand:
            for i, (_, other) in enumerate(self.dying.get(now, ())):
                if other == size:
                    del self.dying[now][i]
                    self.held -= size
                    break
        self.held += size
        self.dying.setdefault(end, []).append((value, size))
        self.buffers.append(Buffer(value, op, size, now, end))
        if self.held > self.most:
            self.most, self.most_at = self.held, now

    def free(self) -> None:
        for _, size in self.dying.pop(self.clock, ()):
            self.held -= size

    def control_flow(self, op: Op) -> None:
        stored, last = self.uses.stored, self.uses.last
        is_loop = op.name == "stablehlo.while"
        end = self.clock + sum(len(_walk(region)) for region in op.regions)
        for value in op.results:
            if stored[value]:
                last[value] = max(last[value], end)
                self.make(op, value, is_loop)
        if is_loop:
            body = op.regions[1]
            for argument, value in zip(body.args, body.results, strict=True):
                if value != argument:
                    self.homes.setdefault(self.root(value), (last[argument], end))
                    self.at_home.add(argument)
        for region in op.regions:
            self.region(region)
