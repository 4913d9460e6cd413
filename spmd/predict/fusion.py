"""Which values of a local program lie in memory: XLA computes the others where they are used.

Backends fuse alike as far as memory is concerned: elementwise ops, broadcasts and everything that
only moves elements around are computed inside whatever reads them, again for each reader unless
that is expensive. Contractions, reductions, collectives and library calls read and write memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from spmd.ir.description import BARRIER, BROADCAST, CONSTANT, REDUCE, SCATTER, Role
from spmd.ir.dialect.reducers import body_reducer
from spmd.ir.dialect.window import running_dim
from spmd.ir.program import Body, Op, OpKind, Program, Region, Value, free_values
from spmd.ir.types import ConvDims, DotDims, Order, TensorType
from spmd.predict.backends import XlaBackend


def stored_values(program: Program) -> frozenset[Value]:
    """Returns the values that get memory of their own; others are computed where they are read."""
    stored = Fused(program, XlaBackend()).stored
    return frozenset(value for value, is_stored in enumerate(stored) if is_stored)


def is_untouched(loop: Op, position: int) -> bool:
    """Whether a loop's body returns a carry unchanged."""
    body = loop.regions[1]
    return body.results[position] == body.args[position]


def wants_stored(op: Op, position: int) -> bool:
    """Whether an op needs an operand in memory, and cannot have it fused in."""
    if op.kind.about.role == Role.UPDATE:
        return position < len(op.results) or op.name == SCATTER
    return op.kind.about.role == Role.CALL


def copied_operands(kind: OpKind, backend: XlaBackend) -> Mapping[int, tuple[int, ...]]:
    """Returns positions of operands that a backend copies first, and the order of the copies' dims.

    An all-to-all's is cut in pieces; a running total (cumsum) goes along the innermost dim.
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


MANY = 16  # tensors that are told apart; a kernel that reads more reads many


def wide_values(program: Program) -> frozenset[Value]:
    """Returns elementwise values that cost less to store than to recompute in each reader.

    Made of n tensors as large as itself, a value takes n * k reads if each of k readers computes it
    again, and n + k reads and a write if it is stored: a residual stream would read all layers in
    front of it. XLA's fusion decides by such costs (`PriorityFusion` on GPUs).
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
        for value in program.body.results:
            self._read(value, 1, True)
        if not backend.is_cpu:
            for value in wide_values(program):
                self.needed[value] = True
        self._region(program.body)

    def home(self, value: Value) -> Value:
        """Returns the value in whose memory this one lies: itself, or what it is an alias of."""
        while value < len(self.root) and self.root[value] != value:  # copies are behind the others
            value = self.root[value]
        return value

    def _read(self, value: Value, readers: int, needed: bool) -> None:
        self.readers[value] += readers
        if needed:
            self.needed[value] = True

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
                for value in op.operands:
                    self._read(value, 1, True)
                for inner in op.regions:
                    for value in free_values(inner):
                        self._read(value, 2, True)
                for inner in reversed(op.regions):
                    for value in inner.results:
                        self._read(value, 1, True)
                    self._region(inner)
            elif not op.results:
                for value in op.operands:
                    self._read(value, 1, True)
            elif not any(map(self.readers.__getitem__, op.results)):
                continue
            elif what == Role.ALIAS or op.kind.is_renaming:
                stops = op.name == BARRIER and not self.backend.is_cpu
                for value, alias in zip(op.operands, op.results, strict=True):
                    if self.readers[alias]:
                        self.root[alias] = value
                        self._read(value, self.readers[alias], self.needed[alias] or stops)
                        self.summed[value] |= self.summed[alias]
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
                for i, value in enumerate(op.operands):
                    self._read(value, 1, i not in copied and wants_stored(op, i))
                    self.summed[value] |= is_library

    def _is_inside(self, op: Op, what: Role) -> bool:
        result = op.results[0]
        if self.needed[result]:
            return False
        if self.summed[result] and op.name != CONSTANT:
            about = op.kind.about
            return (about.in_library or op.name == BROADCAST) and self.readers[result] == 1
        return what == Role.INSIDE or self.readers[result] == 1


# The order of dims in which XLA's CPU kernels read operands; any other order is copied first.
# Products of matrices read (batch, rows, contracted) and (batch, contracted, columns), or either
# one transposed as long as rows, columns and what is contracted are one dim each. Convolutions read
# (batch, spatial, features) and (spatial, in, out). Collectives work along the first dim.


def _orders_read(kind: OpKind) -> list[Order]:
    """Returns the order of dims in which an op wants each of its first operands."""
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


def transposed_results(kind: OpKind) -> Order:
    """Returns the order of dims in which results have to be copied; empty if no copy is needed."""
    if kind.about.collective == "all_gather":
        order = _along(kind.results[0], kind.attrs["all_gather_dim"])
        return () if _is_same(order, kind.results[0]) else tuple(range(kind.results[0].rank))
    return ()


def is_library_reduce(kind: OpKind) -> bool:
    """Whether a reduction is a library call: sum, maximum or minimum of one float32 tensor."""
    if kind.name != REDUCE or len(kind.results) != 1:
        return False
    body = kind.attrs.get("body")
    known = isinstance(body, Body) and body_reducer(body) in ("add", "max", "min")
    return known and kind.operands[0].dtype == "f32"


def _operand(batch: Order, first: Order, second: Order, type_: TensorType) -> Order:
    """Returns the order of dims in which a dot reads an operand.

    A batch of matrices is read as it is, transposed ones too: but these only in exactly that order,
    where dims of size 1 count.
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
    """Whether a tensor's elements lie in this order already; dims of size 1 do not matter."""
    long = [d for d in order if type_.shape[d] != 1]
    return long == sorted(long)
