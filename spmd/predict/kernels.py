"""The kernels that XLA makes of a local program.

    before: %3 = dot %1, %2; %4 = exp %3; %5 = abs %4; %6 = dot %5, %2
    after:  [dot: %1 %2 -> %3], [exp, abs: %3 -> %5], [dot: %5 %2 -> %6]

A kernel makes what lies in memory; everything else is computed inside its readers
(`spmd.predict.fusion`). Transposed copies and copies of what is written over are kernels, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.ir.description import Role
from spmd.ir.dialect.window import running_dim
from spmd.ir.program import Op, Program, Region, Value, free_values
from spmd.ir.types import TensorType
from spmd.predict.backends import Backend
from spmd.predict.fusion import Fused, copied_operands, fuse, is_untouched, wants_stored
from spmd.predict.kernel_order import Dependence, Kernel, breadth_first, combined
from spmd.predict.operands import is_library_reduce, transposed_results


class Kernels(NamedTuple):
    """All kernels of a program.

    Attributes:
      body: in the order in which they run.
      types: of each value; transposed copies are numbered behind the program's values.
      root: the value in whose memory each value lies.
      stored: whether a value has memory of its own.
      copied: number of a copy -> the value that it is a copy of.
    """

    body: tuple[Kernel, ...]
    types: list[TensorType]
    root: tuple[Value, ...]
    stored: tuple[bool, ...]
    copied: dict[Value, Value]


def kernels_of(program: Program, backend: Backend) -> Kernels:
    """The kernels that a backend runs for a local program."""
    fused = fuse(program, backend)
    built = _Builder(program, backend, fused)
    body = built.region(program.body)
    return Kernels(body, built.types, fused.root, fused.stored, built.copied)


class _Builder:
    """Walks a program forwards, and collects its kernels with what each one reads.

    Attributes:
      inputs: value -> the stored values that a reader of it reads instead.
      made_of: stored value of this region -> what is read to compute it again.
      again: those of `made_of` that every reader computes again if it can.
      copies: (value, shape, order of dims) -> its transposed copy in this region.
    """

    # `inputs` carries reads through what is computed inside: with
    #   %2 = dot %0, %1; %3 = exp %2; %4 = abs %3; %5 = dot %4, %1
    # it is {%2: (%2,), %3: (%2,), %4: (%4,)}: the kernel of %4 reads %2 and computes `exp` itself.

    def __init__(self, program: Program, backend: Backend, fused: Fused) -> None:
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
        outer = self.copies, self.made_of, self.again
        self.copies, self.made_of, self.again = {}, {}, set()
        kernels: list[Kernel] = []
        for op in region.ops:
            self.op(op, kernels)
        self.copies, self.made_of, self.again = outer
        if not self.backend.breadth_first:
            return tuple(kernels)
        if self.backend.combines:
            kernels = combined(kernels)
        return breadth_first(self.apart(kernels), region.args)

    def apart(self, kernels: list[Kernel]) -> list[Kernel]:
        """Gives updates and loops copies to write over, of values that others may still read.

        A copy is made as soon as its value is there, and not only when it is written over.
        """
        order = Dependence(kernels)
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
        """The values whose memory a kernel's results take over."""
        op = kernel.op
        if kernel.is_copy:
            return ()
        if op.kind.about.role == Role.UPDATE:
            return self.read(op.operands[: len(op.results)])
        return kernel.handed if op.is_loop else ()

    def copy_of(self, value: Value) -> Value:
        """A new value number, for a copy of a value."""
        self.types.append(self.types[value])
        self.copied[len(self.types) - 1] = value
        return len(self.types) - 1

    def op(self, op: Op, kernels: list[Kernel]) -> None:
        what = op.kind.about.role
        if what == Role.REGION:
            kernels.append(self.control_flow(op))
        elif what == Role.ALIAS:
            for value, alias in zip(op.operands, op.results, strict=True):
                self.inputs[alias] = self.inputs[value]
        elif op.results and not any(map(self.fused.stored.__getitem__, op.results)):
            summed = self.fused.summed[op.results[0]]
            read = (self.read if summed else self.inside)(op.operands)
            if self.backend.breadth_first and op.kind.about.tells_devices:
                read = (*read, self.device(op, kernels))
            self.inputs.update(dict.fromkeys(op.results, read))
        else:
            self.kernel(op, what, kernels)

    def read(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """The stored values that a reader of some values reads."""
        inputs = self.inputs
        if len(values) == 1:
            return inputs[values[0]]
        return tuple(dict.fromkeys([root for value in values for root in inputs[value]]))

    def inside(self, values: Sequence[Value], any_op: bool = False) -> tuple[Value, ...]:
        """The stored values that a kernel reads which computes some values again inside.

        Args:
          values: what it computes.
          any_op: whether to compute also those again that are made of several values of their size.
        """
        roots = self.read(values)
        if not any_op and self.again.isdisjoint(roots):
            return roots
        found: dict[Value, None] = {}
        for root in roots:
            is_again = root in self.again or (any_op and root in self.made_of)
            found.update(dict.fromkeys(self.made_of[root] if is_again else (root,)))
        return tuple(found)

    def kernel(self, op: Op, what: Role, kernels: list[Kernel]) -> None:
        operands = list(op.operands)
        if what <= Role.INSIDE and self.backend.recomputes:
            self.made_of[op.results[0]] = self.inside(operands)
            if self.is_unary(op):
                self.again.add(op.results[0])
        for position, order in copied_operands(op.kind, self.backend).items():
            operands[position] = self.copy(op, operands[position], order, kernels)
        for value in op.results:
            self.inputs[value] = (value,)
        over = what <= Role.UPDATE or op.kind.about.is_in_place
        reads = self.operands(op, what, operands)
        if not (makes := self.first_made(op)):
            kernels.append(Kernel(op, reads, op.results, over))
            return
        kernels.append(Kernel(op, reads, makes))
        for value, first in zip(op.results, makes, strict=True):
            if op.kind.about.collective or self.fused.needed[value]:
                kernels.append(Kernel(op, (first,), (value,), is_copy=True))
            else:  # what its readers add to it is small
                self.inputs[value] = (first,)

    def first_made(self, op: Op) -> tuple[Value, ...]:
        """New values, from which a second kernel makes an op's results; empty if there is none.

        All-gathers along an inner dim are transposed, an all-to-all's pieces are joined, and
        running totals are totals of tiles at first.
        """
        collective = op.kind.about.collective
        is_two = self.backend.transposes and (
            collective == "all_to_all" or bool(transposed_results(op.kind))
        )
        is_two = is_two or (self.backend.rewrites_windows and running_dim(op.kind) is not None)
        return tuple(map(self.copy_of, op.results)) if is_two else ()

    def operands(self, op: Op, what: Role, operands: list[Value]) -> tuple[Value, ...]:
        """The stored values that a kernel reads for its operands, or their copies."""
        is_library = self.backend.library_reduces and is_library_reduce(op.kind)
        reads: dict[Value, None] = {}
        for i, value in enumerate(operands):
            direct = is_library or wants_stored(op, what, i)
            reads.update(dict.fromkeys((self.read if direct else self.inside)((value,))))
        return tuple(reads)

    def is_unary(self, op: Op) -> bool:
        """Whether an op reads one value of its size: reading that instead costs nothing."""
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

    def device(self, op: Op, kernels: list[Kernel]) -> Value:
        """The device's number in this region, which is a kernel: what needs it alone waits."""
        key = ("device",)
        if key not in self.copies:
            self.types.append(TensorType((), "ui32"))
            self.copies[key] = len(self.types) - 1
            kernels.append(Kernel(op, (), (self.copies[key],), is_copy=True))
        return self.copies[key]

    def control_flow(self, op: Op) -> Kernel:
        is_loop = op.is_loop
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
