"""Last rewrite before emission: `spmd.*` helper ops are written as StableHLO ops.

before: `%1 = spmd.axis_index {data}`         (mesh data=4, model=2)
after:  `%1 = convert(partition_id) / 2 % 4`

before: `%3 = spmd.local_slice %2 {data} dim=0`
after:  `%3 = dynamic_slice %2, axis_index * piece, 0`

XLA merges a slice of a slice by adding their starts, as if neither were out of range. So the starts
of a dynamic slice that is sliced again are clamped first:

before: `%3 = dynamic_slice %2, %1; %4 = spmd.local_slice %3`
after:  `%3 = dynamic_slice %2, clamp(0, %1, last); %4 = dynamic_slice %3, ...`
"""

from collections.abc import Callable, Container, Sequence

from spmd.ir.control_flow import Index, Tie, ties
from spmd.ir.description import BROADCAST, CONCATENATE, CONVERT, DYNAMIC_SLICE, RESHAPE, TRANSPOSE
from spmd.ir.dialect.builder import AXIS_INDEX, LOCAL_SLICE, Builder
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK, FLAG
from spmd.ir.dialect.collectives import DEVICE_IDS
from spmd.ir.dialect.manual import IF
from spmd.ir.dialect.reducers import body_reducer, reducer_body
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops, recarried
from spmd.ir.types import TensorType
from spmd.lowering.local.callbacks import FREE, as_bits
from spmd.lowering.local.dims import clamped_index, dynamic_take_dim
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes

TINY = ("i2", "ui2")
NOT_OF_NCCL = ("f8E3M4", "f8E4M3", "f8E4M3FNUZ", "f8E4M3B11FNUZ", "f8E5M2FNUZ", "f8E8M0FNU")
MOVES = (BROADCAST, CONVERT, RESHAPE, TRANSPOSE)  # a slice of their result is made of a slice


def expand(program: Program, mesh: Mesh) -> Program:
    """Returns a local program whose `spmd.axis_index` and `spmd.local_slice` are StableHLO ops.

    Callbacks are put into branches, and ordered ones are linked (`in_order`). Starts of dynamic
    slices that are sliced again are clamped. Elements of 2 bits are joined and sent as bytes, and
    floats that NCCL does not know are sent as bytes or, to be reduced, in bfloat16.
    """
    program = in_order(program)
    sliced = _sliced(program)

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        read = {type_.dtype for type_ in op.kind.operands}
        if (op.collective or op.name == CONCATENATE) and not read.isdisjoint(TINY):
            return _retyped(b, op, TINY, "i8", Builder.convert)  # XLA for CPUs fails
        if op.collective and not read.isdisjoint(NOT_OF_NCCL):
            if "body" in op.kind.attrs:  # bfloat16 has all their values
                return _retyped(b, op, NOT_OF_NCCL, "bf16", Builder.convert)
            return _retyped(b, op, NOT_OF_NCCL, "i8", _bits)
        if op.name == AXIS_INDEX:
            return (_axis_index(b, op.kind.attrs["axes"], mesh),)
        if op.name == CALLBACK and op.kind.attrs[FREE]:
            index = _axis_index(b, op.kind.attrs[FREE], mesh)
            is_first = b.compare("EQ", index, b.constant(0, "i32"))
            types = op.kind.results
            return _where(b, is_first, op, lambda: [b.splat(0, t) for t in types])
        if op.name == CHECK_CALLBACK:
            flag, *values = op.operands
            return _where(b, b.compare("NE", flag, b.splat(0, FLAG)), op, lambda: values)
        if op.name == LOCAL_SLICE:
            dim = op.kind.attrs["dim"]
            size = op.kind.results[0].shape[dim]
            index = _axis_index(b, op.kind.attrs["axes"], mesh)
            start = b.binary("multiply", index, b.constant(size, "i32"))
            return (dynamic_take_dim(b, op.operands[0], dim, start, size),)
        if not op.results or op.results[0] not in sliced:
            return None
        x, *starts = op.operands
        dims = zip(starts, b.types[x].shape, op.kind.attrs["slice_sizes"], strict=True)
        clamped = [clamped_index(b, start, whole - part) for start, whole, part in dims]
        return b.op(op.name, (x, *clamped), op.kind.results, op.kind.attrs)

    return edit_ops(program, edit)


def _sliced(program: Program) -> set[Value]:
    """Returns the results of dynamic slices that another slice reads, directly or behind `MOVES`.

    It may also read them behind a loop or a branch, since XLA inlines loops of one trip.
    """
    producers = Index(program).producers
    comes: dict[Value, list[Value]] = {}  # a value of a loop or a branch -> what it may be
    found, asked, seen = set[Value](), list[Value](), set[Value]()
    for op in program.walk():
        for source, inside, result in ties(op) if op.regions else ():
            ends = inside if source is None else inside[-1:]  # a loop's carry: its next value
            starts = [] if source is None else [source]
            for value in {result, *inside}.difference(ends):
                comes[value] = [*starts, *ends]
        if op.name in (LOCAL_SLICE, DYNAMIC_SLICE):
            asked.append(op.operands[0])
    while asked:
        value = asked.pop()
        if value in seen:
            continue
        seen.add(value)
        asked += comes.get(value, ())
        maker = producers.get(value)
        if maker is not None and maker.name in MOVES:
            asked.append(maker.operands[0])
        elif maker is not None and maker.name == DYNAMIC_SLICE:
            found.add(value)
    return found


def _bits(b: Builder, x: Value, dtype: str) -> Value:
    return as_bits(b, x, b.types[x]._replace(dtype=dtype))


def _retyped(
    b: Builder, op: Op, changed: Container[str], dtype: str,
    to: Callable[[Builder, Value, str], Value],
) -> Sequence[Value]:  # fmt: skip
    """Appends `op` with `dtype` for those in `changed`; returns results of their own types."""
    attrs = op.kind.attrs
    if "body" in attrs:
        attrs = {**attrs, "body": reducer_body(body_reducer(attrs["body"]), dtype)}
    read = [to(b, v, dtype) if b.types[v].dtype in changed else v for v in op.operands]
    types = [t._replace(dtype=dtype) if t.dtype in changed else t for t in op.kind.results]
    made = zip(b.op(op.name, read, types, attrs), op.kind.results, strict=True)
    return [to(b, v, t.dtype) if t.dtype in changed else v for v, t in made]


def _where(
    b: Builder, flag: Value, op: Op, otherwise: Callable[[], Sequence[Value]]
) -> Sequence[Value]:
    """Appends `if flag: op, else: otherwise()`, and returns the results."""
    b.begin()
    done = b.end((), b.repeat(op.kind, op.operands))
    b.begin()
    return b.op(IF, (flag,), op.kind.results, {}, (done, b.end((), otherwise())))


def _axis_index(b: Builder, axes: Axes, mesh: Mesh) -> Value:
    def partition_id() -> Value:
        (raw,) = b.op(DEVICE_IDS[0], (), (TensorType((), "ui32"),))
        return b.convert(raw, "i32")

    # Neighbours in the flattened mesh are merged to runs of (stride, size). On (data=4, model=2)
    # the atoms of {data} have strides 4 and 2: together a run of stride 2 and size 4, so that its
    # index is `position / 2` without remainders. {model, data} has two runs.
    def make() -> Value:
        position = b.once("partition_id", partition_id)
        runs: list[tuple[int, int]] = []
        for a in axes:
            atom = mesh.atoms[a]
            if runs and runs[-1][0] == atom.stride * atom.size:
                runs[-1] = (atom.stride, runs[-1][1] * atom.size)
            else:
                runs.append((atom.stride, atom.size))
        index: Value | None = None
        for stride, size in runs:
            part = position
            if stride > 1:
                part = b.binary("divide", part, b.constant(stride, "i32"))
            if stride * size < mesh.size:
                part = b.binary("remainder", part, b.constant(size, "i32"))
            if index is not None:
                part = b.binary("add", b.binary("multiply", index, b.constant(size, "i32")), part)
            index = part
        return index if index is not None else b.constant(0, "i32")

    return b.once(("index", axes), make)


# Ordered callbacks.

LINKED = "linked"
"""Attribute of a callback that has the number added by `in_order` as last operand and result."""


def in_order(program: Program) -> Program:
    """Makes each ordered callback depend on the one before, so that XLA cannot reorder them.

    Each takes a number that the one before returns. Loops and branches hand the number on:

    before: `spmd.callback %0 {ordered}; while { spmd.callback %1 {ordered} }`
    after:  `%7 = spmd.callback %0, zero; while(%8 = %7) { %9 = spmd.callback %1, %8; return %9 }`
    """
    if not any(map(_is_ordered, program.body.ops)):
        return program
    b = Builder(program.types)
    b.begin()
    first = b.splat(0, FLAG)
    start = b.end((), ()).ops
    body, _ = _linked(b, program.body, first)
    return program._replace(types=tuple(b.types), body=body._replace(ops=(*start, *body.ops)))


def _is_ordered(op: Op) -> bool:
    inner = (inner for region in op.regions for inner in region.ops)
    return bool(op.name == CALLBACK and op.kind.attrs["ordered"]) or any(map(_is_ordered, inner))


def _linked(b: Builder, region: Region, link: Value) -> tuple[Region, Value]:
    ops = []
    for op in region.ops:
        if not _is_ordered(op):
            ops.append(op)
            continue
        after, kind = b.value(FLAG), op.kind
        if op.is_loop:
            # What a condition calls comes after the body before it, for a loop runs one by one.
            test, inside = b.value(FLAG), b.value(FLAG)
            cond, _ = _linked(b, op.regions[0], test)
            body, last = _linked(b, op.regions[1], inside)
            carry = Tie(link, (test, inside, last), after)
            op = recarried(op._replace(regions=(cond, body)), b.types, more=(carry,))
        elif op.regions:
            made = [_linked(b, inner, link) for inner in op.regions]
            op = op._replace(
                kind=OpKind(op.name, kind.operands, (*kind.results, FLAG), kind.attrs),
                results=(*op.results, after),
                regions=tuple(inner._replace(results=(*inner.results, n)) for inner, n in made),
            )
        else:
            types, attrs = (*kind.operands, FLAG), {**kind.attrs, LINKED: True}
            op = op._replace(
                kind=OpKind(op.name, types, (*kind.results, FLAG), attrs),
                operands=(*op.operands, link),
                results=(*op.results, after),
            )
        ops.append(op)
        link = after
    return region._replace(ops=tuple(ops)), link
