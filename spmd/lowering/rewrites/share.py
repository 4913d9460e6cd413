"""Rewrite: what is gathered in several forms is gathered once.

before: `%2 = all_gather %1 {data} dim=0; ...`
        `%5 = transpose %1; %6 = convert %5 : bf16; %7 = all_gather %6 {data} dim=1`
after:  `%2 = all_gather %1 {data} dim=0; ...; %5 = transpose %2; %6 = convert %5 : bf16`

Forms are what converts, transposes and reshapes make of one value. They are followed back to the
last value that all of them have in common; that is gathered where it has no more bytes than the
forms together, and the forms are made of the result. Forms of one narrower type share a gather in
that type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.ir.control_flow import producers_of
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import TensorType
from spmd.lowering.rewrites.moves import Chain


class _Source(NamedTuple):
    """The value that is gathered in place of several forms, its dim and its dtype there."""

    value: Value
    dim: int
    dtype: str
    forms: int


def share_gathers(program: Program) -> Program:
    """Gathers values of which a block gathers several forms once."""
    made = producers_of(program)
    sources: dict[Value, tuple[Chain, _Source]] = {}

    def visit(region: Region) -> None:
        groups: dict[object, list[Chain]] = {}
        for op in region.ops:
            for inner in op.regions:
                visit(inner)
            if op.collective == "all_gather" and len(op.results) == 1:
                form = Chain.of(op, made)
                attrs = op.kind.attrs
                root = (form.values[-1], form.dims[-1], attrs["axes"], attrs.get("groups"))
                groups.setdefault(root, []).append(form)
        for forms in groups.values():
            source = _common(forms, program.types)
            if source is not None:
                sources.update((form.gather.results[0], (form, source)) for form in forms)

    visit(program.body)
    if not sources:
        return program

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        if not op.results or op.results[0] not in sources:
            return None
        form, source = sources[op.results[0]]
        attrs = op.kind.attrs
        key = ("gathered", source, attrs["axes"], attrs.get("groups"))
        gathered = b.once(key, lambda: _gather(b, form, source, now(source.value)))
        b.loc = op.loc
        return (form.repeated(b, form.values.index(source.value), gathered),)

    return edit_ops(program, edit)


def _common(forms: Sequence[Chain], types: Sequence[TensorType]) -> _Source | None:
    """The value to gather for all forms; None where each is better off alone."""
    # Of `%5 = transpose %1; %6 = convert %5`, gathers of %6 and of %5 share %5, gathers of %6 and
    # of %1 share %1: the first value of one chain that is in all others, by value and dim.
    if len(forms) < 2:
        return None
    others = [set(zip(form.values, form.dims, strict=True)) for form in forms[1:]]
    first = zip(forms[0].values, forms[0].dims, strict=True)
    value, dim = next(place for place in first if all(place in other for other in others))
    dtype = types[value].dtype
    wanted = {types[form.values[0]].dtype for form in forms}
    once = all(_converts(form, value) == 1 for form in forms)
    size = types[value].bytes
    if len(wanted) == 1 and once:
        narrower = TensorType(types[value].shape, next(iter(wanted)))
        if narrower.bytes < size:
            dtype, size = narrower.dtype, narrower.bytes
    fits = size <= sum(types[form.values[0]].bytes for form in forms)
    return _Source(value, dim, dtype, len(forms)) if fits else None


def _converts(form: Chain, source: Value) -> int:
    return sum(op.kind.about.is_convert for op in form.moves[: form.values.index(source)])


def _gather(b: Builder, form: Chain, source: _Source, x: Value) -> Value:
    """Gathers the source `x` of several forms, as one of them would have been."""
    gather = form.gather
    note = f"{gather.loc.note} (one gather for {source.forms} forms of it)".strip()
    b.loc = gather.loc._replace(note=note)
    x = b.convert(x, source.dtype)
    result = b.types[x].scaled(source.dim, form.times)
    attrs = {**gather.kind.attrs, "all_gather_dim": source.dim}
    return b.op(gather.name, (x,), (result,), attrs)[0]
