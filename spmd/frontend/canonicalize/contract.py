"""Older ops written with newer ones: `dot`, `einsum`, `broadcast`, `torch_index_select`."""

from __future__ import annotations

from collections.abc import Sequence

from spmd.frontend.canonicalize.site import Site, canonical, reduce_add
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Value
from spmd.ir.types import DotDims, GatherDims


@canonical("stablehlo.dot")
def _dot(site: Site) -> Sequence[Value]:
    """`dot` contracts the last dim of the left operand with the first of the right one."""
    left = site.op.kind.operands[0].rank
    attrs = {**site.attrs, "dot_dimension_numbers": DotDims((), (), (left - 1,), (0,))}
    return site.b.op("stablehlo.dot_general", site.operands, (site.result,), attrs)


@canonical("stablehlo.einsum")
def _einsum(site: Site) -> Sequence[Value]:
    """A letter of one side alone is summed first, then `dot_general`, then a transpose.

    before: `%2 = stablehlo.einsum %0, %1 "ijl,jk->ki"`
    after:  `%2 = reduce_add %0 [2]; %3 = dot_general %2, %1; %4 = transpose %3`
    """
    # Letters of "bij,bjk->bki" by where they are: in both and the output: batch (b); in both alone:
    # contracted (j); in one: free (i, k). The product has them in this order, b i k, and is
    # transposed to the output's.
    b = site.b
    inputs, output = _letters(site)
    if len(inputs) != 2:
        site.fail(f"{len(inputs)} terms for two operands", "write one term for each operand")
    left, lhs = _sum_letters(b, inputs[0], site.operands[0], set(inputs[1] + output))
    right, rhs = _sum_letters(b, inputs[1], site.operands[1], set(inputs[0] + output))
    batch = [c for c in left if c in right and c in output]
    summed = [c for c in left if c in right and c not in output]
    dims = DotDims(
        tuple(map(left.index, batch)),
        tuple(map(right.index, batch)),
        tuple(map(left.index, summed)),
        tuple(map(right.index, summed)),
    )
    free = [c for c in left if c not in right] + [c for c in right if c not in left]
    sizes = {
        **dict(zip(left, b.types[lhs].shape, strict=True)),
        **dict(zip(right, b.types[rhs].shape, strict=True)),
    }
    made = [*batch, *free]
    type_ = site.result.with_shape(tuple(sizes[c] for c in made))
    attrs = {"dot_dimension_numbers": dims}
    if "precision_config" in site.attrs:
        attrs["precision_config"] = site.attrs["precision_config"]
    (product,) = b.op("stablehlo.dot_general", (lhs, rhs), (type_,), attrs)
    return (b.transpose(product, [made.index(c) for c in output]),)


@canonical("stablehlo.unary_einsum")
def _unary_einsum(site: Site) -> Sequence[Value]:
    """Letters that the output lacks are summed; the others are put in its order."""
    inputs, output = _letters(site)
    if len(inputs) != 1:
        site.fail(f"{len(inputs)} terms for one operand", "write one term")
    letters, x = _sum_letters(site.b, inputs[0], site.operands[0], set(output))
    return (site.b.transpose(x, [letters.index(c) for c in output]),)


def _letters(site: Site) -> tuple[list[str], str]:
    """Terms and output of an einsum, `...` written out as Greek letters that no term uses."""
    config = str(site.attrs["einsum_config"]).replace(" ", "")
    left, _, output = config.partition("->")
    terms = left.split(",")
    ranks = [t.rank for t in site.op.kind.operands]
    unused = [c for c in map(chr, range(0x391, 0x3C9)) if c not in config]
    for i, (term, rank) in enumerate(zip(terms, ranks, strict=False)):
        if "..." in term:
            count = rank - len(term) + 3
            letters = "".join(unused[:count])
            terms[i] = term.replace("...", letters)
            output = output.replace("...", letters)
    for term in (*terms, output):
        if len(set(term)) != len(term):
            site.fail(f"a term of {config!r} repeats a letter", "take the diagonal by a gather")
    return terms, output


def _sum_letters(b: Builder, term: str, x: Value, kept: set[str]) -> tuple[str, Value]:
    """Sums away the letters that no other term and not the output has."""
    alone = [d for d, c in enumerate(term) if c not in kept]
    return "".join(c for c in term if c in kept), reduce_add(b, x, alone)


@canonical("stablehlo.broadcast")
def _broadcast(site: Site) -> Sequence[Value]:
    """`broadcast` puts new dims in front."""
    new = len(site.attrs["broadcast_sizes"])
    dims = range(new, site.result.rank)
    return (site.b.broadcast(site.operands[0], site.result.shape, tuple(dims)),)


@canonical("stablehlo.torch_index_select")
def _torch_index_select(site: Site) -> Sequence[Value]:
    """One `gather` along `dim`, with the leading dims of both sides as batch."""
    operand, index = site.op.kind.operands
    dim, batch = site.attrs["dim"], site.attrs["batch_dims"]
    chosen = range(dim, dim + index.rank - batch)
    dims = GatherDims(
        tuple(d for d in range(batch, site.result.rank) if d not in chosen),
        (dim,),
        tuple(range(batch)),
        tuple(range(batch)),
        (dim,),
        index.rank,
    )
    sizes = tuple(1 if d < batch or d == dim else n for d, n in enumerate(operand.shape))
    attrs = {"dimension_numbers": dims, "slice_sizes": sizes, "indices_are_sorted": False}
    return site.b.op("stablehlo.gather", site.operands, (site.result,), attrs)
