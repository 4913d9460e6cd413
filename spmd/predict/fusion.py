"""Which values of a local program are stored in memory, and which kernels make them.

XLA computes all other values where they are used. Backends fuse alike as far as memory is
concerned: elementwise ops, broadcasts and everything that only moves elements around are computed
inside whatever reads them, again for each reader unless that is expensive. Contractions,
reductions, collectives and library calls read and write memory.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from spmd.ir.description import BARRIER, BROADCAST, CONSTANT, CONVERT, REDUCE, SCATTER, Role
from spmd.ir.dialect.reducers import body_reducer
from spmd.ir.dialect.window import running_dim
from spmd.ir.program import Body, Op, OpKind, Program, Region, Value, free_values
from spmd.ir.types import ConvDims, DotDims, Order, TensorType, dtype_bits
from spmd.predict.backends import XlaBackend


def stored_values(program: Program) -> frozenset[Value]:
    """Returns the values that ops store in memory of their own; fused ones and aliases are not."""
    stored = Fused(program, XlaBackend()).stored
    return frozenset(value for value, is_stored in enumerate(stored) if is_stored)


def is_untouched(loop: Op, position: int) -> bool:
    """Whether the body of a while loop returns the carry at a position unchanged."""
    body = loop.regions[1]
    return body.results[position] == body.args[position]


def wants_stored(op: Op, position: int) -> bool:
    """Whether an op reads the operand at a position from memory, so that it cannot be fused in."""
    if op.kind.about.role == Role.UPDATE:
        return position < len(op.results) or op.name == SCATTER
    return op.kind.about.role == Role.CALL


def copied_operands(kind: OpKind, backend: XlaBackend) -> Mapping[int, tuple[int, ...]]:
    """Returns position -> order of dims for the operands that a backend first copies in that order.

    An all-to-all's are cut in pieces (same order); a running total's (cumsum) dim is innermost.
    """
    if backend.rewrites_windows and (running := running_dim(kind)) is not None:
        rank = kind.operands[0].rank
        order = (*(d for d in range(rank) if d != running), running)
        return {} if running == rank - 1 else dict.fromkeys(range(len(kind.results)), order)
    if not backend.is_cpu:
        return {}
    if kind.about.collective == "all_to_all":
        return {i: tuple(range(type_.rank)) for i, type_ in enumerate(kind.operands)}
    found: dict[int, Order] | None = kind._cache.get("operands.transposed")
    if found is None:
        orders = enumerate(_orders_read(kind))
        found = {i: order for i, order in orders if not _is_same(order, kind.operands[i])}
        kind._cache["operands.transposed"] = found
    return found


THIN = 128  # rows, with which products on GPUs and TPUs are bound by reading their weights

MANY = 16  # tensors that are told apart; a kernel that reads more reads many


def wide_values(program: Program) -> frozenset[Value]:
    """Returns elementwise values that cost less to store than to recompute in each reader.

    A value made of n tensors of its size and read by k kernels takes n * k reads if each of these
    computes it again, and n + k reads and a write if it is stored: a residual stream would read all
    layers in front of it. XLA's fusion decides by such costs (`PriorityFusion` on GPUs).
    """
    ops = list(program.walk())
    readers = [0] * len(program.types)
    for op in reversed(ops):
        count = 1
        # What is made of one value alone, a convert, is computed in its own readers' place.
        if op.kind.about.role == Role.INSIDE and len(_as_large(op)) == 1:
            count = readers[op.results[0]]
        for value in op.operands if len(op.operands) < 2 else set(op.operands):
            readers[value] += count
    inputs, found = dict[Value, frozenset[Value]](), set[Value]()
    for op in ops:
        if op.kind.about.role not in (Role.INSIDE, Role.ONCE) or op.kind.name == CONSTANT:
            continue
        result, operands = op.results[0], _as_large(op)
        if len(operands) == 1:  # most are: the set of what is in front of it is shared
            read = inputs.get(operands[0], frozenset(operands))
        else:
            read = frozenset[Value]().union(*[inputs.get(v, (v,)) for v in operands])
            n, k = len(read), readers[result]
            if k > 1 and n * k > n + 1 + k:
                found.add(result)
                continue
        inputs[result] = read if len(read) <= MANY else frozenset(islice(read, MANY))
    return frozenset(found)


def _as_large(op: Op) -> Sequence[Value]:
    # The operands that have at least as many elements as the result, each once.
    cache, operands = op.kind._cache, op.operands
    places: tuple[int, ...] | None = cache.get("as_large")
    if places is None:
        size = op.kind.results[0].size if op.results else 0
        places = tuple(i for i, type_ in enumerate(op.kind.operands) if type_.size >= size)
        cache["as_large"] = places
    if len(places) == 1:
        return (operands[places[0]],)
    return tuple(dict.fromkeys([operands[i] for i in places]))


class Fused:
    """Decides which values of a program a backend stores; others are fused, or are aliases."""

    # Backwards, because whether a value is stored depends on its readers:
    #
    #   %2 = dot %0, %1     stored: a call's result
    #   %3 = exp %2         one reader, the kernel of %4: computed inside it, and passes its reads
    #                       on, so that %2 gets one reader
    #   %4 = abs %3         needed by a call, so it is stored
    #   %5 = dot %4, %1     a result
    #
    # If two kernels read %3 it is stored, for `exp` is expensive (`Role.ONCE`). A cheap op in its
    # place is computed in both, and %2 gets two readers: so readers are counted in kernels.

    def __init__(self, program: Program, backend: XlaBackend) -> None:
        count = len(program.types)
        self.backend = backend
        self.stored = [False] * count  # whether it has memory of its own
        self.root = list(range(count))  # the value in whose memory it lies
        self.readers = [0] * count  # how many kernels read it; 2 stands for more
        self.needed = [False] * count  # whether one of them needs it in memory
        self.summed = [False] * count  # whether a library's reduction reads it under any name
        self.multiplied = [False] * count  # whether a product reads it that widens 8-bit operands
        self._read(program.body.results, 1, True)
        if not backend.is_cpu:
            for value in wide_values(program):
                self.needed[value] = True
        self._region(program.body)

    def home(self, value: Value) -> Value:
        """Returns the value in whose memory this one is: itself, or what it is an alias of."""
        while value < len(self.root) and self.root[value] != value:  # copies are behind the others
            value = self.root[value]
        return value

    def _read(self, values: Iterable[Value], readers: int, needed: bool) -> None:
        for value in values:
            self.readers[value] += readers
            self.needed[value] |= needed

    def _region(self, region: Region) -> None:
        for op in reversed(region.ops):
            what = op.kind.about.role
            if what == Role.REGION:
                for i, value in enumerate(op.results):
                    if op.is_loop and is_untouched(op, i):
                        self.root[value] = op.operands[i]
                        self.readers[op.operands[i]] += 1
                    else:
                        self.stored[value] = op.is_loop or self.readers[value] > 0
                self._read(op.operands, 1, True)
                for inner in op.regions:
                    self._read(free_values(inner), 2, True)
                for inner in reversed(op.regions):
                    self._read(inner.results, 1, True)
                    self._region(inner)
            elif not op.results:
                self._read(op.operands, 1, True)
            elif not any(map(self.readers.__getitem__, op.results)):
                continue
            elif what == Role.ALIAS or op.kind.is_renaming:
                stops = op.name == BARRIER and not self.backend.is_cpu
                for value, alias in zip(op.operands, op.results, strict=True):
                    if self.readers[alias]:
                        self.root[alias] = value
                        self._read((value,), self.readers[alias], self.needed[alias] or stops)
                        self.summed[value] |= self.summed[alias]
                        self.multiplied[value] |= self.multiplied[alias]
            elif what <= Role.ONCE and self._is_inside(op, what):
                result = op.results[0]
                for value in dict.fromkeys(op.operands):
                    self.readers[value] += min(self.readers[result], 2)
                    self.summed[value] |= self.summed[result]
            elif op.name != CONSTANT:  # constants lie in the executable
                for value in op.results:
                    self.stored[value] = True
                copied = copied_operands(op.kind, self.backend)
                is_library = self.backend.is_cpu and is_library_reduce(op.kind)
                is_thin = not self.backend.is_cpu and is_thin_product(op.kind)
                for i, value in enumerate(op.operands):
                    needed = i not in copied and wants_stored(op, i)
                    self._read((value,), 1, needed and not is_thin)
                    self.summed[value] |= is_library
                    self.multiplied[value] |= is_thin

    def _is_inside(self, op: Op, what: Role) -> bool:
        result = op.results[0]
        is_widening = op.name == CONVERT and dtype_bits(op.kind.operands[0].dtype) == 8
        if self.needed[result] or (self.multiplied[result] and not is_widening):
            return False
        if self.summed[result] and op.name != CONSTANT:
            return (op.kind.about.in_library or op.name == BROADCAST) and self.readers[result] == 1
        return what == Role.INSIDE or self.readers[result] == 1


# The order of dims in which XLA's CPU kernels read operands; any other order is copied first.
# Products of matrices read (batch, rows, contracted) and (batch, contracted, columns), or either
# one transposed as long as rows, columns and what is contracted are one dim each. Convolutions read
# (batch, spatial, features) and (spatial, in, out). Collectives work along the first dim.


def _orders_read(kind: OpKind) -> list[Order]:
    """Returns the order of dims in which CPUs read each operand of an op; [] if any will do."""
    if kind.about.reads == "matrices":
        # A weight gradient `b s i, b s o -> i o` contracts b and s: its left operand is read as
        # i, b, s and is copied first, its right one as b, s, o, which is how it lies.
        dims: DotDims = kind.attrs["dot_dimension_numbers"]
        lhs, rhs = kind.operands
        rows = _others(lhs.rank, dims.lhs_batch, dims.lhs_contract)
        columns = _others(rhs.rank, dims.rhs_batch, dims.rhs_contract)
        return [
            _operand(dims.lhs_batch, rows, dims.lhs_contract, lhs),
            _operand(dims.rhs_batch, dims.rhs_contract, columns, rhs),
        ]
    if kind.about.reads == "images":
        conv: ConvDims = kind.attrs["dimension_numbers"]
        features = conv.kernel_input_feature, conv.kernel_output_feature
        first = (conv.input_batch, *conv.input_spatial, conv.input_feature)
        return [first, (*conv.kernel_spatial, *features)]
    if kind.about.collective and kind.about.along:
        return [_along(type_, kind.attrs[kind.about.along]) for type_ in kind.operands]
    return []


def is_library_reduce(kind: OpKind) -> bool:
    """Whether CPUs reduce by a library call: sum, maximum or minimum of one float32 tensor."""
    if kind.name != REDUCE or len(kind.results) != 1:
        return False
    body = kind.attrs.get("body")
    known = isinstance(body, Body) and body_reducer(body) in ("add", "max", "min")
    return known and kind.operands[0].dtype == "f32"


def is_thin_product(kind: OpKind) -> bool:
    """Whether a product has so few rows that XLA widens 8-bit weights on their way into it.

    With more it writes them in the wider type first, for a library's kernel.
    """
    if kind.about.reads != "matrices":
        return False
    dims: DotDims = kind.attrs["dot_dimension_numbers"]
    free = (
        type_.size // math.prod(type_.shape[d] for d in (*batch, *contract))
        for type_, batch, contract in zip(
            kind.operands,
            (dims.lhs_batch, dims.rhs_batch),
            (dims.lhs_contract, dims.rhs_contract),
            strict=True,
        )
    )
    return min(free, default=0) <= THIN


def _operand(batch: Order, first: Order, second: Order, type_: TensorType) -> Order:
    """Returns the order of dims in which CPUs read a dot's operand: batch, first, then second dims.

    With one first and one second dim, an operand whose dims lie as batch, second, first is read as
    it is, too: the order is then that of its dims. Dims of size 1 count there.
    """
    as_it_is = tuple(range(type_.rank))
    if len(first) == len(second) == 1 and (*batch, *second, *first) == as_it_is:
        return as_it_is
    return (*batch, *first, *second)


def _others(rank: int, *used: Order) -> Order:
    taken = {d for dims in used for d in dims}
    return tuple(d for d in range(rank) if d not in taken)


def _along(type_: TensorType, dim: int) -> Order:
    return (dim, *_others(type_.rank, (dim,)))


def _is_same(order: Order, type_: TensorType) -> bool:
    """Whether `order` is the order of a tensor's dims already; dims of size 1 do not matter."""
    long = [d for d in order if type_.shape[d] != 1]
    return long == sorted(long)


# The kernels that XLA makes of a local program, in the order in which they run.
#
#     before: %3 = dot %1, %2; %4 = exp %3; %5 = abs %4; %6 = dot %5, %2
#     after:  [dot: %1 %2 -> %3], [exp, abs: %3 -> %5], [dot: %5 %2 -> %6]
#
# A kernel makes what lies in memory; everything else is computed inside its readers. Transposed
# copies and copies of what is written over are kernels, too.


class Kernel(NamedTuple):
    """One kernel that a backend launches: an op, with others that are fused into it."""

    op: Op  # whose results it makes, or that the copy is for
    reads: tuple[Value, ...]  # stored values, read directly or through what is computed inside
    makes: tuple[Value, ...]  # the values that it stores
    writes_over: bool = False  # an operand of the same size that no op reads again
    is_copy: bool = False  # of a value, transposed
    handed: tuple[Value, ...] = ()  # for a loop, the operands in whose memory its carries lie
    regions: "tuple[tuple[Kernel, ...], ...]" = ()  # for control flow, each region's kernels


def combined(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels; independent all-reduces of a kind among the same devices become one."""
    # Their depth, the number of all-reduces on the way to them, tells which those are:
    #   %2 = all_reduce %0   depth 0        before: [%2: %0] [%3: %2] [%4: %1]
    #   %3 = all_reduce %2   depth 1        after:  [%2 %4: %0 %1] [%3: %2]
    #   %4 = all_reduce %1   depth 0
    depth: dict[Value, int] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, kernel in enumerate(kernels):
        here = max((depth.get(v, 0) for v in (*kernel.reads, *kernel.handed)), default=0)
        if kernel.op.collective == "all_reduce" and not kernel.is_copy:
            attrs = kernel.op.kind.attrs
            alike = attrs.get("axes"), attrs.get("groups"), attrs.get("body"), here
            groups.setdefault(alike, []).append(i)
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
    """Returns a region's kernels in the order in which their operands get ready.

    XLA's scheduler for CPUs uses this order, so that independent kernels can run at the same time.

    before: [a: x], [b: a], [c: x], [d: b c]         in the order of the program
    after:  [a: x], [c: x], [b: a], [d: b c]         c needs just x, as a does
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
    first = [i for i, count in enumerate(missing) if not count]
    ready = deque[int]()
    order: list[Kernel] = []

    def release(values: Iterable[Value]) -> None:
        for value in values:
            for i in readers.get(value, ()):
                missing[i] -= 1
                if not missing[i]:
                    ready.append(i)

    # Kernels without operands come first, as they stand; then those that need the region's
    # arguments alone, in the order in which their last argument is released.
    release(dict.fromkeys((*arguments, *captured)))
    ready.extendleft(reversed(first))
    while ready:
        kernel = kernels[ready.popleft()]
        order.append(kernel)
        release(kernel.makes)
    return tuple(order)


class Kernels:
    """Finds the kernels that a backend runs for a local program; `body` has them in order."""

    # `inputs` carries reads through what is computed inside: with
    #   %2 = dot %0, %1; %3 = exp %2; %4 = abs %3; %5 = dot %4, %1
    # it is {%2: (%2,), %3: (%2,), %4: (%4,)}: the kernel of %4 reads %2 and computes `exp` itself.

    def __init__(self, program: Program, backend: XlaBackend) -> None:
        self.backend = backend
        self.fused = Fused(program, backend)
        self.types = list(program.types)  # transposed copies are behind the program's values
        # Value -> the stored values that a reader of it reads instead.
        self.inputs: dict[Value, tuple[Value, ...]] = {}
        # Stored value of this region -> what is read to compute it again.
        self.made_of: dict[Value, tuple[Value, ...]] = {}
        self.again: set[Value] = set()  # those that every reader computes again if it can
        self.copied: dict[Value, Value] = {}  # number of a copy -> the value that it is a copy of
        # (value, shape, order of dims) -> its transposed copy in this region
        self.copies: dict[tuple[object, ...], Value] = {}
        self.body = self._region(program.body)  # in the order in which they run

    def _region(self, region: Region) -> tuple[Kernel, ...]:
        self.inputs.update((value, (value,)) for value in region.args)
        outer = self.copies, self.made_of, self.again
        self.copies, self.made_of, self.again = {}, {}, set()
        kernels: list[Kernel] = []
        for op in region.ops:
            what = op.kind.about.role
            if what == Role.REGION:
                is_loop, inputs = op.is_loop, self.inputs
                free = [value for region in op.regions for value in free_values(region)]
                inputs.update((value, (value,)) for value in op.results)
                kept = []  # carries that the loop does not change
                for value, result in zip(op.operands, op.results, strict=False):
                    if self.fused.root[result] == value:
                        inputs[result] = inputs[value]
                        kept.append(value)
                regions = tuple(map(self._region, op.regions))
                makes = tuple(value for value in op.results if self.fused.stored[value])
                reads = self._read((*free, *kept))
                begins = tuple(
                    v for value in op.operands if value not in kept for v in inputs[value]
                )
                kernels.append(Kernel(op, reads, makes, is_loop, False, begins, regions))
            elif what == Role.ALIAS:
                for value, alias in zip(op.operands, op.results, strict=True):
                    self.inputs[alias] = self.inputs[value]
            elif op.results and not any(map(self.fused.stored.__getitem__, op.results)):
                summed = self.fused.summed[op.results[0]]
                read = (self._read if summed else self._inside)(op.operands)
                if self.backend.is_cpu and op.kind.about.tells_devices:
                    # The device's number in this region is a kernel: what needs it alone waits.
                    key = ("device",)
                    if key not in self.copies:
                        self.types.append(TensorType((), "ui32"))
                        self.copies[key] = len(self.types) - 1
                        kernels.append(Kernel(op, (), (self.copies[key],), is_copy=True))
                    read = (*read, self.copies[key])
                self.inputs.update(dict.fromkeys(op.results, read))
            else:
                self._kernel(op, what, kernels)
        self.copies, self.made_of, self.again = outer
        if not self.backend.is_cpu:
            return tuple(kernels)
        return breadth_first(self._apart(combined(kernels)), region.args)

    def _apart(self, kernels: list[Kernel]) -> list[Kernel]:
        """Returns the kernels, with copies added of values that are overwritten while still read.

        Updates and loops write over the copy. It is made as soon as its value is there.
        """
        makers: dict[Value, int] = {}  # value -> number of the kernel that makes it
        readers: dict[Value, list[int]] = {}
        for i, kernel in enumerate(kernels):
            makers.update(dict.fromkeys(kernel.makes, i))
            for value in dict.fromkeys((*kernel.reads, *kernel.handed)):
                readers.setdefault(value, []).append(i)

        def is_last(number: int, value: Value) -> bool:
            """Whether kernel `number` is sure to run after all others that read a value."""
            # Not by the order of the program: a backend that runs kernels breadth first may still
            # have another reader ahead of it. So the search follows what the kernel waits for,
            # backwards, until it has met all other readers.
            missing = set(readers[value]) - {number}
            if value in kernels[number].handed and value in kernels[number].reads:
                return False
            if not missing or max(missing) > number:
                return not missing
            first, waiting, seen = min(missing), [number], {number}
            while waiting and missing:
                kernel = kernels[waiting.pop()]
                for read in (*kernel.reads, *kernel.handed):
                    maker = makers.get(read, -1)
                    if maker >= first and maker not in seen:
                        seen.add(maker)
                        missing.discard(maker)
                        waiting.append(maker)
            return not missing

        found: list[Kernel] = []
        for i, kernel in enumerate(kernels):
            taken: set[Value] = set()
            written_over = kernel.handed if kernel.op.is_loop else ()
            if kernel.op.kind.about.role == Role.UPDATE and not kernel.is_copy:
                written_over = self._read(kernel.op.operands[: len(kernel.op.results)])
            for k, value in enumerate(written_over):
                if value in makers and (value in taken or not is_last(i, value)):
                    copy = self._copy_of(value)
                    found.append(Kernel(kernel.op, (value,), (copy,), is_copy=True))
                    if kernel.handed:
                        handed = [copy if h == k else v for h, v in enumerate(kernel.handed)]
                        kernel = kernel._replace(handed=tuple(handed))
                    else:
                        reads = tuple(copy if v == value else v for v in kernel.reads)
                        kernel = kernel._replace(reads=reads)
                taken.add(value)
            found.append(kernel)
        return found

    def _copy_of(self, value: Value) -> Value:
        self.types.append(self.types[value])
        self.copied[len(self.types) - 1] = value
        return len(self.types) - 1

    def _read(self, values: Sequence[Value]) -> tuple[Value, ...]:
        inputs = self.inputs
        if len(values) == 1:
            return inputs[values[0]]
        return tuple(dict.fromkeys([root for value in values for root in inputs[value]]))

    def _inside(self, values: Sequence[Value], any_op: bool = False) -> tuple[Value, ...]:
        """Returns the stored values that a kernel reads to get `values`, recomputing stored ones.

        It recomputes elementwise ones made of one value of their size; with `any_op`, of several.
        """
        roots = self._read(values)
        if not any_op and self.again.isdisjoint(roots):
            return roots
        again = self.made_of.keys() if any_op else self.again
        read = [self.made_of[root] if root in again else (root,) for root in roots]
        return tuple(dict.fromkeys(chain(*read)))

    def _kernel(self, op: Op, what: Role, kernels: list[Kernel]) -> None:
        operands = list(op.operands)
        if what <= Role.INSIDE and self.backend.is_cpu:
            self.made_of[op.results[0]] = self._inside(operands)
            # One that reads one value of its size is computed again: to read that costs no more.
            ends, size = zip(operands, op.kind.operands, strict=True), op.kind.results[0].size
            if sum(type_.size >= size and bool(self.inputs[v]) for v, type_ in ends) <= 1:
                self.again.add(op.results[0])
        for position, order in copied_operands(op.kind, self.backend).items():
            operands[position] = self._copy(op, operands[position], order, kernels)
        for value in op.results:
            self.inputs[value] = (value,)
        over = what <= Role.UPDATE or op.kind.about.is_in_place
        is_library = self.backend.is_cpu and is_library_reduce(op.kind)
        read = [
            self.inputs[value] if is_library or wants_stored(op, i) else self._inside((value,))
            for i, value in enumerate(operands)
        ]
        reads, collective = tuple(dict.fromkeys(chain(*read))), op.kind.about.collective
        # A second kernel transposes what an all-gather along an inner dim makes, joins an
        # all-to-all's pieces, and makes running totals of totals of tiles.
        is_two = self.backend.is_cpu and collective == "all_to_all"
        if self.backend.is_cpu and collective == "all_gather":
            made = op.kind.results[0]
            is_two = not _is_same(_along(made, op.kind.attrs["all_gather_dim"]), made)
        is_two |= self.backend.rewrites_windows and running_dim(op.kind) is not None
        if not is_two:
            kernels.append(Kernel(op, reads, op.results, over))
            return
        makes = tuple(map(self._copy_of, op.results))
        kernels.append(Kernel(op, reads, makes))
        for value, first in zip(op.results, makes, strict=True):
            if collective or self.fused.needed[value]:
                kernels.append(Kernel(op, (first,), (value,), is_copy=True))
            else:  # what its readers add to it is small
                self.inputs[value] = (first,)

    def _copy(self, op: Op, value: Value, order: tuple[int, ...], kernels: list[Kernel]) -> Value:
        """Returns a copy of a value in an order of dims, made once for all that read it so."""
        key = (self.fused.root[value], self.types[value].shape, order)
        if key not in self.copies:
            found = self.copies[key] = self._copy_of(value)
            self.inputs[found] = (found,)
            reads = self._inside((value,), self.types[value].rank > 2)
            kernels.append(Kernel(op, reads, (found,), is_copy=True))
        return self.copies[key]
