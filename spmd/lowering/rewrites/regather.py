"""Rewrite: what is taken apart only to be put together again stays whole.

before: `%2 = reduce_scatter %1 {data} dim=0; %3 = all_gather %2 {data} dim=0`   (no other use)
after:  `%3 = all_reduce %1 {data}`

The bytes are the same, the latency is that of one collective. Where the scattered sum has another
use it stays, and is gathered: that sends no more than a sum that is sliced, and the other use need
not wait for all of it.

before: `%2 = local_slice %1 {data} dim=0; %3 = all_gather %2 {data} dim=0`
after:  `%3` is `%1`

(Only what is the same on all devices along the atoms is ever sliced over them.)

Transposes and reshapes between the two change places with the gather. Sums over links of both kinds
are scattered and gathered on purpose: that comes later (`two_level`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd.ir.control_flow import producers_of, users_of
from spmd.ir.dialect.builder import LOCAL_SLICE, Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.lowering.rewrites.dead import remove_dead
from spmd.lowering.rewrites.moves import again, operand_dim


def regather(program: Program) -> Program:
    """Undoes gathers of what was whole before, or could have been."""
    made, users = producers_of(program), users_of(program)
    ways: dict[Value, list[Op]] = {}
    for op in program.walk():
        if op.collective == "all_gather" and len(op.results) == 1:
            way = _way_back(op, made)
            if way and (way[-1].name == LOCAL_SLICE or _alone(way, users)):
                ways[op.results[0]] = way
    if not ways:
        return program

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        if not op.results or (way := ways.get(op.results[0])) is None:
            return None
        return (_whole(b, op, now(way[-1].operands[0]), way),)

    return remove_dead(edit_ops(program, edit))


def _way_back(gather: Op, made: Mapping[Value, Op]) -> list[Op]:
    """The ops from a gather's operand back to what took it apart the same way, else []."""
    # %2 = reduce_scatter %1 dim=0; %3 = transpose %2; %4 = all_gather %3 dim=1: the gathered dim is
    # dim 0 in front of the transpose, as the scattered one is: [transpose, reduce_scatter].
    way, dim = [], gather.kind.attrs["all_gather_dim"]
    attrs = gather.kind.attrs
    op = made.get(gather.operands[0])
    while op is not None and (op.kind.about.is_transpose or op.kind.about.is_reshape):
        way.append(op)
        before = operand_dim(op.kind, dim)
        if before is None:
            return []
        dim, op = before, made.get(op.operands[0])
    if op is None or not _is_apart(op) or "groups" in attrs or "groups" in op.kind.attrs:
        return []
    same = op.kind.attrs["axes"] == attrs["axes"] and op.kind.attrs[op.kind.about.along] == dim
    return [*way, op] if same else []


def _is_apart(op: Op) -> bool:
    """Whether an op leaves each device with a piece along a dim."""
    return op.collective == "reduce_scatter" or op.name == LOCAL_SLICE


def _alone(way: Sequence[Op], users: Mapping[Value, Sequence[object]]) -> bool:
    """Whether each op's result is read only once, by the next op on the way."""
    return all(len(users[op.results[0]]) == 1 for op in way)


def _whole(b: Builder, gather: Op, x: Value, way: Sequence[Op]) -> Value:
    """The gather's result, made of the whole `x` that the last op of the way took apart."""
    *between, apart = way
    if apart.collective == "reduce_scatter":
        note = f"{apart.loc.note} (and gathered: {gather.loc.note})"
        b.loc = apart.loc._replace(note=note if gather.loc.note else apart.loc.note)
        attrs = apart.kind.attrs
        x = b.collective("all_reduce", x, b.types[x], attrs["axes"], body=attrs["body"])
    dims = [gather.kind.attrs["all_gather_dim"]]
    for op in between[:-1]:
        found = operand_dim(op.kind, dims[-1])
        assert found is not None, "the way back followed it"
        dims.append(found)
    wide, narrow = gather.kind.results[0], gather.kind.operands[0]
    times = wide.shape[dims[0]] // narrow.shape[dims[0]]
    for op, dim in zip(reversed(between), reversed(dims[: len(between)]), strict=True):
        b.loc = op.loc
        x = again(b, op, (x,), op.kind.results[0].scaled(dim, times))
    return x
