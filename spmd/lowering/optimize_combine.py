"""Rewrite: small all-reduces over the same axes travel together.

before: `%3 = all_reduce %1 {data}; ...; %9 = all_reduce %8 {data}`
after:  `...; %3, %9 = all_reduce %1, %8 {data}`

A small collective costs latency, not bytes: one for all costs it once. An all-reduce waits until
one of the waiting results is read, so that nothing is delayed that was needed earlier.
"""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.program import Loc, Op, OpKind, Program, Region, Value, free_values

SMALL_BYTES = 1 << 20
"""All-reduces up to this size wait for others; larger ones are worth their own start."""


class _Key(NamedTuple):
    axes: tuple[int, ...]
    body: object


def combine(program: Program, small_bytes: int = SMALL_BYTES) -> Program:
    """Combines small all-reduces within each block."""

    def region(old: Region) -> Region:
        ops: list[Op] = []
        waiting: dict[_Key, list[Op]] = {}
        results_of: dict[Value, _Key] = {}

        def flush(key: _Key) -> None:
            group = waiting.pop(key)
            for member in group:
                del results_of[member.results[0]]
            ops.append(_combined(group))

        for op in old.ops:
            reads = op.operands
            if op.regions:
                op = op._replace(regions=tuple(region(r) for r in op.regions))
                reads = (*reads, *(v for r in op.regions for v in free_values(r)))
            for key in dict.fromkeys(results_of[v] for v in reads if v in results_of):
                if key in waiting:
                    flush(key)
            if _is_small(op, small_bytes):
                key = _Key(op.kind.attrs["axes"], op.kind.attrs["body"])
                waiting.setdefault(key, []).append(op)
                results_of[op.results[0]] = key
            else:
                ops.append(op)
        for key in list(waiting):
            flush(key)
        return Region(old.args, tuple(ops), old.results)

    return program._replace(body=region(program.body))


def _is_small(op: Op, small_bytes: int) -> bool:
    return (
        op.name == "stablehlo.all_reduce"
        and len(op.operands) == 1
        and op.kind.operands[0].bytes <= small_bytes
    )


def _combined(group: list[Op]) -> Op:
    if len(group) == 1:
        return group[0]
    operands = tuple(op.operands[0] for op in group)
    results = tuple(op.results[0] for op in group)
    types = tuple(op.kind.operands[0] for op in group)
    kind = OpKind("stablehlo.all_reduce", types, types, group[0].kind.attrs)
    first = group[0].loc
    note = f"{first.note} (and {len(group) - 1} more like it)"
    return Op(kind, operands, results, (), Loc(first.scope, first.frames, note))
