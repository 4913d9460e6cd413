"""Memory of one device, predicted from the local program: what is stored, from when until when.

    before: %3 = dot %1, %2; %4 = exp %3; %5 = dot %4, %2     (%1 dies at the first dot)
    after:  %3 stored at 0..0, %4 in the place of %3 at 1..2, %5 a result

Time is the number of a kernel in the order in which they run (`spmd.predict.fusion`), a loop's
kernels before the loop itself. Rules: an elementwise kernel writes over an operand of the same size
that no later kernel reads, a loop's carries have one place as long as the loop runs, and donated
arguments are overwritten by the results of the same type. The place of a result is free until the
result is made: other values are there before.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from spmd.errors import bytes_text
from spmd.ir.description import CONSTANT, Role
from spmd.ir.dialect.composites import WORKSPACE
from spmd.ir.dialect.host import hosted
from spmd.ir.program import Op, Program, Region, Value, reads
from spmd.ir.types import TensorType
from spmd.predict.backends import XlaBackend, backend_of
from spmd.predict.fusion import Kernel, Kernels


class Buffer(NamedTuple):
    """Memory that one value takes on one device, from one kernel to another."""

    type: TensorType
    op: Op  # that makes the value, or that a transposed copy is made for
    bytes: int
    start: int  # numbers of the first kernel and of the last one during which it is held
    end: int
    is_copy: bool = False  # of the value, transposed
    in_result: bool = False  # lies in the place of a result that is made later

    @property
    def label(self) -> str:
        """The op's name in reports: `dot_general`, `copy for dot_general`."""
        return f"copy for {self.op.label}" if self.is_copy else self.op.label

    @property
    def name(self) -> str:
        """The label and the user's source line, for reports."""
        return f"{self.label} {self.op.loc.source}".strip()


class MemoryUse(NamedTuple):
    """The memory of one device while a program runs, in bytes."""

    arguments: int  # held throughout
    results: int
    aliased: int  # of the results, what lies in donated arguments
    reused: frozenset[int]  # positions of these results
    temporary: int  # the most that all other values take at once
    peak_at: int  # number of the kernel at which that is
    buffers: tuple[Buffer, ...]  # of all other values, in order of `start`
    order: tuple[Op, ...]  # the op of each kernel, as they run
    constants: int = 0  # in pieces or whole, held throughout

    def __repr__(self) -> str:
        names = ("arguments", "results", "aliased", "temporary", "constants")
        parts = [f"{name} {bytes_text(getattr(self, name))}" for name in names]
        return f"<MemoryUse: peak {bytes_text(self.peak)} ({', '.join(parts)})>"

    @property
    def peak(self) -> int:
        """The most bytes that one device holds at once, all things together."""
        return self.arguments + self.results - self.aliased + self.temporary + self.constants

    def at_peak(self) -> tuple[Buffer, ...]:
        """Returns the buffers held at the peak, largest first, less those in results' places."""
        held = [b for b in self.buffers if b.start <= self.peak_at <= b.end and not b.in_result]
        return tuple(sorted(held, key=lambda b: -b.bytes))


def peak_memory(
    program: Program, donated: Sequence[int] = (), platform: str | None = None
) -> MemoryUse:
    """Returns the predicted memory of one device that runs a local program.

    The arguments at the positions `donated` may be overwritten. The platform is `cpu`, `cuda` or
    `tpu`, whose backends order kernels differently; None for a backend with none of their ways.
    """
    return _Simulation(program, donated, backend_of(platform)).run()


def alive_bytes(program: Program) -> int:
    """Returns the peak in bytes if every value is held from its op to the last one that reads it.

    An estimate, ten times as fast as `peak_memory`: fused values, and all arguments, count as held.
    """
    sizes = [type_.bytes for type_ in program.types]

    def region(block: Region) -> int:
        last = {v: i for i, op in enumerate(block.ops) for v in reads(op)}
        last |= dict.fromkeys(block.results, len(block.ops))
        spans = [
            (i, last.get(v, i), sizes[v]) for i, op in enumerate(block.ops) for v in op.results
        ]
        inside = {i: max(map(region, op.regions)) for i, op in enumerate(block.ops) if op.regions}
        return fullest(spans, inside)[0]

    return sum(sizes[v] for v in program.body.args) + region(program.body)


def fullest(
    spans: Iterable[tuple[int, int, int]], inside: Mapping[int, int] = MappingProxyType({})
) -> tuple[int, int]:
    """Returns the most bytes that are held at once, and the first moment at which they are.

    Each span is (first moment, last moment, bytes held from the one to the other); `inside` has
    moment -> more bytes that are held at that moment only.
    """
    change = Counter[int]()
    for start, end, size in spans:
        change[start] += size
        change[end + 1] -= size
    now = most = at = 0
    for moment in sorted(change.keys() | inside):
        now += change[moment]
        total = now + inside.get(moment, 0)
        if total > most:
            most, at = total, moment
    return most, at


def constant_bytes(program: Program) -> int:
    """Returns the bytes of a program's constants on one device; splats (one number) take none."""
    attrs = (op.kind.attrs for op in program.walk() if op.name == CONSTANT)
    constants = (found["value"] for found in attrs)
    whole = sum(len(dense.data) for dense in constants if not dense.splat)
    return whole + sum(program.types[v].bytes for v in lifted(program))


def lifted(program: Program) -> tuple[Value, ...]:
    """Returns a program's last arguments: those that hold constants lifted out of the program."""
    return program.body.args[len(program.body.args) - len(program.constants) :]


def _span(start: int, end: int) -> int:
    """Returns an integer with a bit set for each kernel from `start` (or 0) to `end`."""
    return (1 << (end + 1)) - (1 << max(start, 0))


class _Simulation:
    """Allocates and frees values kernel by kernel, and records during which each is held."""

    def __init__(self, program: Program, donated: Sequence[int], backend: XlaBackend) -> None:
        self.program, self.backend, self.kernels = program, backend, Kernels(program, backend)
        self.home = self.kernels.fused.home
        # Result -> the donated argument that it lies in: the first free one of its type, as in jax.
        self.aliases: dict[int, int] = {}
        types, body = program.types, program.body
        moved = hosted(program)
        self.in_host = moved.arguments | moved.results  # what takes no memory of a device
        self.passing = moved.passing
        free: dict[object, list[int]] = {}
        for position in donated:
            value = body.args[position]
            free.setdefault((types[value], value in self.in_host), []).append(position)
        for position, value in enumerate(body.results):
            if places := free.get((types[value], value in self.in_host)):
                self.aliases[position] = places.pop(0)
        self.last = [-1] * len(self.kernels.types)  # number of the last kernel that reads a value
        self.length = 0  # how many kernels there are
        self.find_last(self.kernels.body)
        self.read(body.results)
        self.now = 0  # the number of the kernel that runs
        # The place of each result, by its home: the kernels in whose time a value lies there, a bit
        # each. Other values can lie there before the result is made.
        self.taken: dict[Value, int] = {}
        self.whole: list[int] = []  # numbers of the buffers that are one piece of memory each
        self.order: list[Op] = []
        self.buffers: list[Buffer] = []
        self.dying: dict[int, list[int]] = {}  # kernel -> the buffers that are freed behind it
        # For a value that ends up in a given place (a donated argument's, a result's, or a
        # carry's): the last kernel that reads what lies there before, and the last that needs the
        # value.
        self.homes: dict[Value, tuple[int, int]] = {}
        self.at_home: set[Value] = set()  # values in an argument's or in a carry's memory

    def find_last(self, kernels: Sequence[Kernel]) -> None:
        for kernel in kernels:
            self.read(kernel.handed)
            for region, inner in zip(kernel.op.regions, kernel.regions, strict=False):
                self.find_last(inner)
                self.read(region.results)
            self.read(kernel.reads)
            self.length += 1

    def read(self, values: Sequence[Value]) -> None:
        for value in values:
            self.last[self.home(value)] = self.length

    def run(self) -> MemoryUse:
        last, body = self.last, self.program.body
        sizes, places = list(map(self.size, body.results)), list[tuple[int, Value]]()
        for position, value in enumerate(body.results):
            argument = self.aliases.get(position)
            free_from = -1 if argument is None else last[body.args[argument]]
            home = self.home(value)
            self.homes.setdefault(home, (free_from, self.length))
            if home not in self.taken:
                self.taken[home] = _span(-1, free_from)
                places.append((sizes[position], home))
            if argument is not None:
                self.at_home.add(body.args[argument])
        self.region(self.kernels.body)
        # Some buffers lie in results' places. The largest is put first, in the smallest place that
        # fits, as in XLA's buffer assignment (`BufferAssigner::AssignSingleHloBuffer`).
        buffers, taken = list(self.buffers), self.taken
        places = sorted(places, key=itemgetter(0)) if self.backend.fills_results else []
        for i in sorted(self.whole, key=lambda i: (-buffers[i].bytes, buffers[i].start)):
            held = _span(buffers[i].start, buffers[i].end)
            for _, home in places[bisect_left(places, buffers[i].bytes, key=itemgetter(0)) :]:
                if not taken[home] & held:
                    taken[home] |= held
                    buffers[i] = buffers[i]._replace(in_result=True)
                    break
        most, most_at = fullest([(b.start, b.end, b.bytes) for b in buffers if not b.in_result])
        return MemoryUse(
            sum(map(self.size, body.args[: len(body.args) - len(self.program.constants)])),
            sum(sizes),
            sum(sizes[position] for position in self.aliases),
            frozenset(self.aliases),
            most,
            most_at,
            tuple(buffers),
            tuple(self.order),
            constant_bytes(self.program),
        )

    def size(self, value: Value) -> int:
        return 0 if value in self.in_host else self.program.types[value].bytes

    def region(self, kernels: Sequence[Kernel]) -> None:
        for kernel in kernels:
            op, about, last = kernel.op, kernel.op.kind.about, self.last
            is_at_home = about.role == Role.UPDATE and not kernel.is_copy
            if is_at_home:  # it writes over an argument's or a carry's memory that is free by now
                roots = [self.home(value) for value in op.operands[: len(op.results)]]
                is_at_home = all(v in self.at_home and last[v] <= self.now for v in roots)
            if is_at_home:
                self.at_home.update(kernel.makes)
            else:
                for value in kernel.makes:
                    self.make(kernel, value)
                # What a composite holds while it runs, beside its operands and results.
                size = op.kind.attrs.get(WORKSPACE, 0)
                if self.backend.is_cpu and about.workspace is not None:
                    size = about.workspace(op.kind)
                if size and not kernel.is_copy:
                    type_ = self.kernels.types[kernel.makes[0]]
                    self.hold(Buffer(type_, op, size, self.now, self.now))
            if kernel.regions and op.is_loop:
                body, end = op.regions[1], self.end_of(kernel)
                for argument, value in zip(body.args, body.results, strict=True):
                    if value != argument:
                        self.homes.setdefault(self.home(value), (last[argument], end))
                        self.at_home.add(argument)
            for inner in kernel.regions:
                self.region(inner)
            self.dying.pop(self.now, None)
            self.order.append(op)
            self.now += 1

    def make(self, kernel: Kernel, value: Value) -> None:
        """Allocates a value that a kernel makes, maybe in memory of what no later kernel reads."""
        # A result whose place is free by now is made right there and takes no more memory. With
        # %0 donated: `%2 = dot %0, %1; %3 = abs %2` stores %2, and puts %3 in %0's place, since
        # nothing reads %0 behind the dot. In `%2 = abs %0` %0 is read by the very kernel that makes
        # %2; an elementwise kernel may write over it as it goes, a dot may not.
        if value in self.in_host:
            return
        now, type_ = self.now, self.kernels.types[value]
        if value in self.passing:  # XLA updates one part after the other, as they come and leave
            self.hold(Buffer(type_, kernel.op, type_.bytes, now, now))
            return
        free_from, end = self.homes.get(value, (None, self.last[value]))
        # It takes over one buffer that is read for the last time now. XLA asks for equal shapes,
        # elements included (`CanShareOperandBufferWithUser`).
        for number in self.dying.get(now, ()) if kernel.writes_over else ():
            buffer = self.buffers[number]
            if buffer.type == type_ and buffer.start < now:
                self.dying[now].remove(number)
                self.buffers[number] = buffer._replace(end=now - 1)
                break
        if free_from is not None and (free_from < now or (free_from == now and kernel.writes_over)):
            if value in self.taken:
                self.taken[value] |= _span(now, self.length)
            return
        end = max(end, self.end_of(kernel))
        of = self.kernels.copied.get(value, value)
        if kernel.op.collective != "all_to_all" or of == value:  # else one buffer for each device
            self.whole.append(len(self.buffers))
        is_widened = self.backend.widens_halves and type_.dtype in ("bf16", "f16")
        size = type_.bytes * (2 if is_widened else 1)
        self.hold(Buffer(type_, kernel.op, size, now, end, kernel.is_copy))

    def hold(self, buffer: Buffer) -> None:
        self.dying.setdefault(buffer.end, []).append(len(self.buffers))
        self.buffers.append(buffer)

    def end_of(self, kernel: Kernel) -> int:
        """Returns the number of the last kernel of a loop or conditional; of others, their own."""

        def count(kernels: Sequence[Kernel]) -> int:
            return sum(1 + sum(map(count, kernel.regions)) for kernel in kernels)

        return self.now + sum(map(count, kernel.regions))
