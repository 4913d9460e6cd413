"""The kernels that XLA makes of a local program, in the order in which a backend runs them.

    before: %3 = dot %1, %2; %4 = exp %3; %5 = abs %4; %6 = dot %5, %2
    after:  [dot: %1 %2 -> %3], [exp, abs: %3 -> %5], [dot: %5 %2 -> %6]

A kernel makes what lies in memory; everything else is computed inside its readers
(`spmd.planning.fusion`). What differs between backends is one table, `Backend`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmd.ir.program import Op, Program, Region, Value, free_values
from spmd.ir.types import TensorType
from spmd.planning.fusion import Role, role
from spmd.planning.operands import is_library_reduce, transposed_operands, transposed_results


class Backend(NamedTuple):
    """What a backend of XLA does in its own way, as far as memory is concerned.

    Attributes:
      widens_halves: 16-bit floats are held as 32-bit ones, arguments and results excepted.
      breadth_first: kernels run in the order in which their operands are there, so that independent
        ones can run at the same time; else in the order of the program.
      transposes: contractions, convolutions and collectives want dims in one order; other
        operands are transposed copies.
      library_reduces: sums and maxima of float32 are library calls: of what leads to them only a
        product is computed inside.
      recomputes: elementwise ops of one operand are computed again inside of whoever can, even where
        a library call wants them stored.
      combines: all-reduces that do not wait for each other are one.
    """

    widens_halves: bool = False
    breadth_first: bool = False
    transposes: bool = False
    library_reduces: bool = False
    recomputes: bool = False
    combines: bool = False


BACKENDS = {"cpu": Backend(True, True, True, True, True, True)}
"""By platform; the others keep the order of the program, and what their layouts cost is not known."""


_SCATTER = "stablehlo.scatter"
_WHILE = "stablehlo.while"
_PRODUCTS = ("stablehlo.multiply", "chlo.square")


class Kernel(NamedTuple):
    """Something that runs at once.

    Attributes:
      op: the op whose results it makes; of a copy, the op that the copy is for.
      reads: the stored values that it reads, directly or through what is computed inside.
      makes: the values that it stores.
      writes_over: whether it may write over an operand of the same size that nobody reads again.
      is_copy: whether it makes a transposed copy.
      handed: of a loop, the operands that it goes on with as its carries.
      regions: of control flow, each region's kernels.
    """

    op: Op
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    writes_over: bool = False
    is_copy: bool = False
    handed: tuple[Value, ...] = ()
    regions: tuple[tuple[Kernel, ...], ...] = ()


class Kernels(NamedTuple):
    """All kernels of a program.

    Attributes:
      body: in the order in which they run.
      types: of each value; transposed copies are numbered behind the program's values.
      root: the value in whose memory each value lies.
      stored: whether a value has memory of its own.
      copied: copy -> the value that it is a copy of.
    """

    body: tuple[Kernel, ...]
    types: list[TensorType]
    root: list[Value]
    stored: list[bool]
    copied: dict[Value, Value]


def kernels_of(program: Program, backend: Backend) -> Kernels:
    """What a backend runs for a local program."""
    fused = _Fusion(program, backend)
    built = _Builder(program, backend, fused)
    body = built.region(program.body)
    return Kernels(body, built.types, fused.root, fused.stored, built.copied)


def stored_values(program: Program) -> frozenset[Value]:
    """Values that get memory of their own; the others are computed where they are read."""
    stored = _Fusion(program, Backend()).stored
    return frozenset(value for value, is_stored in enumerate(stored) if is_stored)


def is_untouched(loop: Op, position: int) -> bool:
    """Whether a loop hands a carry on as it is."""
    body = loop.regions[1]
    return body.results[position] == body.args[position]


def wants_stored(op: Op, what: Role, position: int) -> bool:
    """Whether an op wants an operand in memory, and not computed inside."""
    if what == Role.UPDATE:
        return position < len(op.results) or op.name == _SCATTER
    return what == Role.CALL


class _Fusion:
    """Backwards over a program: which values are stored.

    Attributes:
      stored: whether a value has memory of its own.
      root: the value in whose memory an alias lies.
      readers: how many kernels read a value; 2 stands for more.
      needed: whether one of them wants it stored.
      summed: whether it leads to a library's reduction, and is computed inside if that can.
    """

    def __init__(self, program: Program, backend: Backend) -> None:
        count = len(program.types)
        self.backend = backend
        self.types = program.types
        self.stored = [False] * count
        self.root = list(range(count))
        self.readers = [0] * count
        self.needed = [False] * count
        self.summed = [False] * count
        for value in program.body.results:
            self.read(value, 1, True)
        self.region(program.body)

    def read(self, value: Value, readers: int, needed: bool) -> None:
        self.readers[value] += readers
        if needed:
            self.needed[value] = True

    def region(self, region: Region) -> None:
        for op in reversed(region.ops):
            what = role(op.kind)
            if what == Role.REGION:
                self.control_flow(op)
            elif not op.results:
                for value in op.operands:
                    self.read(value, 1, True)
            elif not any([self.readers[v] for v in op.results]):
                continue
            elif what == Role.ALIAS:
                self.alias(op)
            elif what <= Role.ONCE and self.is_inside(op, what):
                self.inside(op)
            elif op.name != "stablehlo.constant":  # that comes with the executable
                self.store(op, what)

    def alias(self, op: Op) -> None:
        for value, alias in zip(op.operands, op.results, strict=True):
            if self.readers[alias]:
                self.root[alias] = value
                self.read(value, self.readers[alias], self.needed[alias])
                self.summed[value] |= self.summed[alias]

    def is_inside(self, op: Op, what: Role) -> bool:
        """Whether an op is computed inside its readers."""
        result = op.results[0]
        if self.needed[result]:
            return False
        if self.summed[result] and op.name != "stablehlo.constant":
            return op.name in _PRODUCTS and self.readers[result] == 1
        return what == Role.INSIDE or self.readers[result] == 1

    def inside(self, op: Op) -> None:
        result = op.results[0]
        count = min(self.readers[result], 2)
        for value in op.operands:
            self.read(value, count, self.summed[result])

    def store(self, op: Op, what: Role) -> None:
        for value in op.results:
            self.stored[value] = True
        copied = transposed_operands(op.kind) if self.backend.transposes else ()
        is_library = self.backend.library_reduces and is_library_reduce(op.kind)
        for i, value in enumerate(op.operands):
            self.read(value, 1, i not in copied and wants_stored(op, what, i))
            if is_library:
                self.summed[value] = True

    def control_flow(self, op: Op) -> None:
        is_loop = op.name == _WHILE
        for i, value in enumerate(op.operands):
            if is_loop and is_untouched(op, i):
                self.root[op.results[i]] = value
                self.read(value, 2, True)
            else:
                self.stored[op.results[i]] = is_loop
                self.read(value, 1, True)
        if not is_loop:
            for value in op.results:
                self.stored[value] = self.readers[value] > 0
        for region in op.regions:
            for value in free_values(region):
                self.read(value, 2, True)
        for region in reversed(op.regions):
            for value in region.results:
                self.read(value, 1, True)
            self.region(region)


class _Builder:
    """Forwards over a program: the kernels, and what each reads."""

    def __init__(self, program: Program, backend: Backend, fused: _Fusion) -> None:
        self.backend = backend
        self.fused = fused
        self.types = list(program.types)
        self.inputs: dict[Value, tuple[Value, ...]] = {}
        self.made_of: dict[Value, tuple[Value, ...]] = {}
        self.again: set[Value] = set()
        self.copied: dict[Value, Value] = {}
        self.copies: dict[tuple[object, ...], Value] = {}

    def region(self, region: Region) -> tuple[Kernel, ...]:
        self.inputs.update((value, (value,)) for value in region.args)
        outer, self.copies = self.copies, {}
        kernels: list[Kernel] = []
        for op in region.ops:
            self.op(op, kernels)
        self.copies = outer
        if not self.backend.breadth_first:
            return tuple(kernels)
        if self.backend.combines:
            kernels = combined(kernels)
        return breadth_first(self.apart(kernels), region.args)

    def apart(self, kernels: list[Kernel]) -> list[Kernel]:
        """Updates and loops get copies to write over of what others may read later, too.

        A copy is made as soon as its value is there, and not when it is written over.
        """
        order = _Dependence(kernels)
        found: list[Kernel] = []
        for i, kernel in enumerate(kernels):
            taken: set[Value] = set()
            for k, value in enumerate(self.written_over(kernel)):
                if value in order.makers and (value in taken or not order.is_last(i, value)):
                    copy = self.copy_of(value)
                    found.append(Kernel(kernel.op, (value,), (copy,), is_copy=True))
                    kernel = _instead(kernel, k, value, copy)
                taken.add(value)
            found.append(kernel)
        return found

    def written_over(self, kernel: Kernel) -> tuple[Value, ...]:
        """The values in whose memory a kernel goes on."""
        op = kernel.op
        if kernel.is_copy:
            return ()
        if role(op.kind) == Role.UPDATE:
            return self.read(op.operands[: len(op.results)])
        return kernel.handed if op.name == _WHILE else ()

    def copy_of(self, value: Value) -> Value:
        """The number of a new copy."""
        self.types.append(self.types[value])
        self.copied[len(self.types) - 1] = value
        return len(self.types) - 1

    def op(self, op: Op, kernels: list[Kernel]) -> None:
        what = role(op.kind)
        if what == Role.REGION:
            kernels.append(self.control_flow(op))
        elif what == Role.ALIAS:
            for value, alias in zip(op.operands, op.results, strict=True):
                self.inputs[alias] = self.inputs[value]
        elif op.results and not any([self.fused.stored[v] for v in op.results]):
            summed = self.fused.summed[op.results[0]]
            self.inputs[op.results[0]] = (self.read if summed else self.inside)(op.operands)
        else:
            self.kernel(op, what, kernels)

    def read(self, values: Iterable[Value]) -> tuple[Value, ...]:
        """What is read from memory to get at some values."""
        return tuple(dict.fromkeys(root for value in values for root in self.inputs[value]))

    def inside(self, values: Iterable[Value], any_op: bool = False) -> tuple[Value, ...]:
        """What is read by who computes some values inside, even if others want them stored.

        Args:
          values: any.
          any_op: whether to compute them again if they are made of several values of their size.
        """
        found: dict[Value, None] = {}
        for root in self.read(values):
            is_again = root in self.again or (any_op and root in self.made_of)
            found.update(dict.fromkeys(self.made_of[root] if is_again else (root,)))
        return tuple(found)

    def kernel(self, op: Op, what: Role, kernels: list[Kernel]) -> None:
        operands = list(op.operands)
        if what <= Role.INSIDE and self.backend.recomputes:
            self.made_of[op.results[0]] = self.inside(operands)
            if self.is_unary(op):
                self.again.add(op.results[0])
        if self.backend.transposes:
            for position, order in transposed_operands(op.kind).items():
                operands[position] = self.copy(op, operands[position], order, kernels)
        for value in op.results:
            self.inputs[value] = (value,)
        over = what <= Role.UPDATE and not (self.backend.breadth_first and op.name == _SCATTER)
        is_library = self.backend.library_reduces and is_library_reduce(op.kind)
        reads: dict[Value, None] = {}
        for i, value in enumerate(operands):
            direct = is_library or wants_stored(op, what, i)
            reads.update(dict.fromkeys((self.read if direct else self.inside)((value,))))
        kernels.append(Kernel(op, tuple(reads), op.results, over))
        if self.backend.transposes and (order := transposed_results(op.kind)):
            for value in op.results:
                self.inputs[value] = (self.copy(op, value, order, kernels),)

    def is_unary(self, op: Op) -> bool:
        """Whether an op is made of one value of its size: it costs nothing to read that instead."""
        size = op.kind.results[0].size
        pairs = zip(op.operands, op.kind.operands, strict=True)
        return sum(type_.size >= size and bool(self.inputs[v]) for v, type_ in pairs) <= 1

    def copy(self, op: Op, value: Value, order: tuple[int, ...], kernels: list[Kernel]) -> Value:
        """A transposed copy of a value, made once for all that read it in this order."""
        key = (self.fused.root[value], self.types[value].shape, order)
        found = self.copies.get(key)
        if found is None:
            found = self.copies[key] = self.copy_of(value)
            self.inputs[found] = (found,)
            reads = self.inside((value,), self.types[value].rank > 2)
            kernels.append(Kernel(op, reads, (found,), is_copy=True))
        return found

    def control_flow(self, op: Op) -> Kernel:
        is_loop = op.name == _WHILE
        free = [value for region in op.regions for value in free_values(region)]
        kept = [v for i, v in enumerate(op.operands) if is_loop and is_untouched(op, i)]
        handed = [v for v in op.operands if v not in kept]
        regions = tuple(self.region(region) for region in op.regions)
        for i, value in enumerate(op.results):
            untouched = is_loop and is_untouched(op, i)
            self.inputs[value] = self.inputs[op.operands[i]] if untouched else (value,)
        makes = tuple(value for value in op.results if self.fused.stored[value])
        reads = self.read((*free, *kept))
        begins = tuple(root for value in handed for root in self.inputs[value])
        return Kernel(op, reads, makes, is_loop, False, begins, regions)


def _instead(kernel: Kernel, position: int, value: Value, copy: Value) -> Kernel:
    """A kernel that writes over a copy of a value."""
    if kernel.handed:
        handed = [copy if i == position else v for i, v in enumerate(kernel.handed)]
        return kernel._replace(handed=tuple(handed))
    return kernel._replace(reads=tuple(copy if v == value else v for v in kernel.reads))


class _Dependence:
    """Which kernels of a region wait for which.

    Attributes:
      makers: value -> the number of the kernel that makes it.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = list(kernels)
        self.makers: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {}
        for i, kernel in enumerate(kernels):
            self.makers.update(dict.fromkeys(kernel.makes, i))
            for value in dict.fromkeys((*kernel.reads, *kernel.handed)):
                self.readers.setdefault(value, []).append(i)

    def is_last(self, number: int, value: Value) -> bool:
        """Whether a kernel waits for all others that read a value."""
        missing = set(self.readers[value]) - {number}
        if value in self.kernels[number].handed and value in self.kernels[number].reads:
            return False
        if not missing or max(missing) > number:
            return not missing
        first, waiting, seen = min(missing), [number], {number}
        while waiting and missing:
            kernel = self.kernels[waiting.pop()]
            for read in (*kernel.reads, *kernel.handed):
                maker = self.makers.get(read, -1)
                if maker >= first and maker not in seen:
                    seen.add(maker)
                    missing.discard(maker)
                    waiting.append(maker)
        return not missing


def combined(kernels: Sequence[Kernel]) -> list[Kernel]:
    """All-reduces over the same axes that do not wait for each other, as one kernel."""
    depth: dict[Value, int] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, kernel in enumerate(kernels):
        here = max((depth.get(v, 0) for v in (*kernel.reads, *kernel.handed)), default=0)
        if kernel.op.name == "stablehlo.all_reduce" and not kernel.is_copy:
            attrs = kernel.op.kind.attrs
            groups.setdefault((attrs.get("axes"), attrs.get("body"), here), []).append(i)
            here += 1
        depth.update(dict.fromkeys(kernel.makes, here))
    found: list[Kernel | None] = list(kernels)
    for numbers in groups.values():
        members = [kernels[i] for i in numbers]
        reads = dict.fromkeys(v for kernel in members for v in kernel.reads)
        makes = tuple(v for kernel in members for v in kernel.makes)
        for i in numbers:
            found[i] = None
        found[numbers[-1]] = members[-1]._replace(reads=tuple(reads), makes=makes)
    return [kernel for kernel in found if kernel is not None]


def breadth_first(kernels: Sequence[Kernel], arguments: Sequence[Value]) -> tuple[Kernel, ...]:
    """Kernels in the order in which what they read is there, as a queue has it.

    That is what XLA's scheduler for CPUs does, so that independent kernels can run at the same time.

    Args:
      kernels: of one region, in the order of the program.
      arguments: the region's.
    """
    made = {value for kernel in kernels for value in kernel.makes}
    captured = [v for k in kernels for v in (*k.handed, *k.reads) if v not in made]
    readers: dict[Value, list[int]] = {}
    missing: list[int] = []
    for i, kernel in enumerate(kernels):
        reads = dict.fromkeys((*kernel.handed, *kernel.reads))
        missing.append(len(reads))
        for value in reads:
            readers.setdefault(value, []).append(i)
    ready = deque(i for i, count in enumerate(missing) if not count)
    order: list[Kernel] = []

    def release(values: Iterable[Value]) -> None:
        for value in values:
            for i in readers.get(value, ()):
                missing[i] -= 1
                if not missing[i]:
                    ready.append(i)

    first, ready = ready, deque()
    release(dict.fromkeys((*arguments, *captured)))
    ready.extendleft(reversed(first))
    while ready:
        kernel = kernels[ready.popleft()]
        order.append(kernel)
        release(kernel.makes)
    return tuple(order)
