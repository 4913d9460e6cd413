"""Rewrite: small all-reduces over the same axes travel together, as one flat buffer.

before: `%3 = all_reduce %1 {data}; ...; %9 = all_reduce %8 {data}`
after:  `...; %20 = all_reduce concatenate(flat %1, flat %8) {data}; %3, %9 = slices of %20`

A small collective costs latency, not bytes: one for all costs it once. Small all-reduces move up
to where their operand is made; there they wait until one of the waiting results is read, so that
nothing is delayed that was needed earlier.

(StableHLO's variadic all_reduce would say the same without copies, but XLA 0.10's export rejects
it inside a manually partitioned loop: "Sharding is tuple-shaped but validation shape is not".)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from spmd.ir.program import Op, OpKind, Program, Region, Value, free_values
from spmd.ir.types import TensorType

SMALL_BYTES = 1 << 20
"""All-reduces up to this size wait for others; larger ones are worth their own start."""


class _Key(NamedTuple):
    axes: tuple[int, ...]
    groups: object
    body: object


def combine(program: Program, small_bytes: int = SMALL_BYTES) -> Program:
    """Combines small all-reduces within each block."""
    types = list(program.types)

    def region(old: Region) -> Region:
        ops: list[Op] = []
        waiting: dict[_Key, list[Op]] = {}
        results_of: dict[Value, _Key] = {}

        def flush(key: _Key) -> None:
            group = waiting.pop(key)
            for member in group:
                del results_of[member.results[0]]
            ops.extend(_combined(group, types))

        for op in _started_early(old, small_bytes):
            reads = op.operands
            if op.regions:
                op = op._replace(regions=tuple(region(r) for r in op.regions))
                reads = (*reads, *(v for r in op.regions for v in free_values(r)))
            for key in dict.fromkeys(results_of[v] for v in reads if v in results_of):
                if key in waiting:
                    flush(key)
            if _is_small(op, small_bytes):
                attrs = op.kind.attrs
                key = _Key(attrs["axes"], attrs.get("groups"), attrs["body"])
                waiting.setdefault(key, []).append(op)
                results_of[op.results[0]] = key
            else:
                ops.append(op)
        for key in list(waiting):
            flush(key)
        return Region(old.args, tuple(ops), old.results)

    body = region(program.body)
    return program._replace(types=tuple(types), body=body)


def _started_early(region: Region, small_bytes: int) -> list[Op]:
    """The ops of a block with every small all-reduce right behind the op that makes its operand."""
    early: dict[Value, list[Op]] = {}
    made = {result for op in region.ops for result in op.results}
    for op in region.ops:
        if _is_small(op, small_bytes) and op.operands[0] in made:
            early.setdefault(op.operands[0], []).append(op)
    moved = {id(op) for ops in early.values() for op in ops}
    ordered: list[Op] = []
    waiting = [op for op in region.ops if id(op) not in moved]
    for op in waiting:
        ordered.append(op)
        ready = list(op.results)
        while ready:  # an all-reduce may feed another one over other axes
            for follower in early.get(ready.pop(0), ()):
                ordered.append(follower)
                ready += follower.results
    return ordered


def _is_small(op: Op, small_bytes: int) -> bool:
    return op.name == "stablehlo.all_reduce" and op.kind.operands[0].bytes <= small_bytes


def _combined(group: list[Op], types: list[TensorType]) -> list[Op]:
    """The ops that reduce a group as one flat buffer; a group of one stays as it is."""
    if len(group) == 1:
        return group
    ops: list[Op] = []
    first = group[0]
    loc = first.loc._replace(note=f"{first.loc.note} (and {len(group) - 1} more with it)")
    dtype = first.kind.operands[0].dtype

    def add(name: str, operands: tuple[Value, ...], shape: tuple[int, ...], **attrs: Any) -> Value:
        types.append(TensorType(shape, dtype))
        result = len(types) - 1
        kind = OpKind(name, tuple(types[v] for v in operands), (types[result],), attrs)
        ops.append(Op(kind, operands, (result,), (), loc))
        return result

    sizes = [op.kind.operands[0].size for op in group]
    flat = tuple(
        add("stablehlo.reshape", (op.operands[0],), (size,))
        for op, size in zip(group, sizes, strict=True)
    )
    joined = add("stablehlo.concatenate", flat, (sum(sizes),), dimension=0)
    reduced = add("stablehlo.all_reduce", (joined,), (sum(sizes),), **first.kind.attrs)
    start = 0
    for op, size in zip(group, sizes, strict=True):
        part = add(
            "stablehlo.slice",
            (reduced,),
            (size,),
            start_indices=(start,),
            limit_indices=(start + size,),
            strides=(1,),
        )
        kind = OpKind("stablehlo.reshape", (types[part],), op.kind.results, {})
        ops.append(Op(kind, (part,), op.results, (), op.loc))
        start += size
    return ops
