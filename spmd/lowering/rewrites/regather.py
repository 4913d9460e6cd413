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

from collections.abc import Sequence

from spmd.ir.dead import remove_dead
from spmd.ir.dialect.builder import LOCAL_SLICE, Builder
from spmd.ir.index import Index
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.lowering.rewrites.moves import Chain


def regather(program: Program) -> Program:
    """Undoes gathers of what was whole before, or could have been."""
    index = Index(program)
    made = index.producers
    chains: dict[Value, tuple[Chain, Op]] = {}
    for op in program.walk():
        if op.collective == "all_gather" and len(op.results) == 1:
            chain = Chain.of(op, made)
            apart = made.get(chain.values[-1])
            if apart is not None and _undoes(chain, apart, index):
                chains[op.results[0]] = chain, apart
    if not chains:
        return program

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        if not op.results or op.results[0] not in chains:
            return None
        chain, apart = chains[op.results[0]]
        return (_whole(b, chain, apart, now(apart.operands[0])),)

    return remove_dead(edit_ops(program, edit))


def _undoes(chain: Chain, apart: Op, index: Index) -> bool:
    """Whether a gather puts together just what `apart`, in front of its moves, took apart."""
    # %2 = reduce_scatter %1 dim=0; %3 = transpose %2; %4 = all_gather %3 dim=1: the gathered dim is
    # dim 0 in front of the transpose, as the scattered one is.
    scatters = apart.collective == "reduce_scatter"
    if not scatters and apart.name != LOCAL_SLICE:
        return False
    attrs, others = apart.kind.attrs, chain.gather.kind.attrs
    same = attrs["axes"] == others["axes"] and attrs[apart.kind.about.along] == chain.dims[-1]
    if not same or "groups" in attrs or "groups" in others:
        return False
    converts = any(op.kind.about.is_convert for op in chain.moves)
    return not converts and (not scatters or all(len(index.users[v]) == 1 for v in chain.values))


def _whole(b: Builder, chain: Chain, apart: Op, x: Value) -> Value:
    """The gather's result, made of the whole `x` that `apart` took apart."""
    if apart.collective == "reduce_scatter":
        why = chain.gather.loc.note
        note = f"{apart.loc.note} (and gathered: {why})" if why else apart.loc.note
        b.loc = apart.loc._replace(note=note)
        attrs = apart.kind.attrs
        x = b.collective("all_reduce", x, b.types[x], attrs["axes"], body=attrs["body"])
    return chain.repeated(b, len(chain.moves), x)
