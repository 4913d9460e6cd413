"""Experts on one device: what its experts add to its rows, in *turns* of some choices each.

Shapes are in the names, as in `spmd.ops.experts`. A *choice* is one of the C experts that a row has
chosen. Products are of rows that are sorted by their expert.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Product = Callable[[Any, Any, Any], Any]
"""(rows (R, I) sorted by expert, weights (E, O, I), number of rows of each expert) -> (R, O): each
row times its expert's weights."""

FEW = 1 << 10
"""So many choices are compared each with each, in one kernel of a GPU or two: to sort takes ten."""

SLOPE = 1.702  # of the sigmoid in gpt-oss' activation

_BY_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


def ragged(x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    """Returns (R, O): each row times its expert's weights, by XLA's ragged product."""
    return jax.lax.ragged_dot_general(x_RI, weights_EOI.astype(x_RI.dtype), sizes_E, _BY_ROWS)


class ExpertMlp(NamedTuple):
    """How an expert's MLP is computed."""

    product: Product = ragged
    limit: float = 0.0  # of gpt-oss' activation (see `spmd.ops.experts`); 0 is SwiGLU


def forward(*operands: Any, count: int, mlp: ExpertMlp) -> Any:
    """Returns (B, S, H): for each row, the gated sum of its chosen experts on this device.

    Operands are rows, gates, chosen experts, the numbers of the experts here, their weights gate,
    up and down, and perhaps biases of gate and up, and scales of gate, up and down. Experts have
    the numbers 1 to `count`; 0 is none.
    """
    x_BSH, gates_BSC, chosen_BSC, numbers_E, *weights = operands
    choices = _Choices.of(chosen_BSC, numbers_E, count)
    x_TH, gates_X = x_BSH.reshape(-1, x_BSH.shape[-1]), gates_BSC.reshape(-1)

    def turn(i: Any, out_TH: Any) -> Any:
        part = choices.turn(i)
        added_RH = added(x_TH[part.row_R], gates_X[part.at_R], part, weights, mlp)
        return out_TH + choices.summed(i, added_RH)

    return choices.turns(turn, jnp.zeros_like(x_TH)).reshape(x_BSH.shape)


def gradient(*operands: Any, count: int, mlp: ExpertMlp) -> Any:
    """Returns gradients of rows, gates and weights; operands are `forward`'s, then `dout`."""
    x_BSH, gates_BSC, chosen_BSC, numbers_E, *weights, dout_BSH = operands
    choices = _Choices.of(chosen_BSC, numbers_E, count)
    x_TH, dout_TH = (x.reshape(-1, x.shape[-1]) for x in (x_BSH, dout_BSH))
    gates_X = gates_BSC.reshape(-1)

    def turn(i: Any, sums: Any) -> Any:
        part = choices.turn(i)
        pull = pull_of(x_TH[part.row_R], gates_X[part.at_R], part, weights, mlp)
        dx_RH, dgates_R, *dweights = pull(dout_TH[part.row_R])
        dx_TH, dgates_X, *before = sums
        dx_TH += choices.summed(i, dx_RH)
        dgates_X += choices.returned(i, dgates_R)
        return dx_TH, dgates_X, *with_terms(before, dweights)

    nothing = (jnp.zeros_like(x_TH), jnp.zeros_like(gates_X))
    zeros = (jnp.zeros(x.shape, jnp.float32) for x in weights)
    dx_TH, dgates_X, *dweights = choices.turns(turn, (*nothing, *zeros))
    found = (total.astype(x.dtype) for total, x in zip(dweights, weights, strict=True))
    return dx_TH.reshape(x_BSH.shape), dgates_X.reshape(gates_BSC.shape), *found


class Turn(NamedTuple):
    """The up to R choices that are computed in one turn, sorted by their expert."""

    # at_R, row_R: their places among all choices, and the rows that made them
    at_R: Any
    row_R: Any
    is_here_R1: Any  # whether there is such a choice; the last ones are padding
    ends_E: Any  # where those of each expert at hand end, one expert behind the other


def sorted_by(key_X: Any) -> tuple[Any, Any]:
    """Returns which numbers come one after the other, and where in that order each of them is.

    (7, 9, 5) -> (2, 0, 1), (1, 2, 0); equal ones stay in their order.
    """
    at_X = jnp.arange(key_X.shape[0], dtype=jnp.int32)
    if key_X.shape[0] > FEW:
        order_X = jnp.argsort(key_X, stable=True)
        return order_X, jnp.zeros_like(order_X).at[order_X].set(at_X, unique_indices=True)
    is_equal_XX, is_less_XX = (compare(key_X, key_X[:, None]) for compare in (jnp.equal, jnp.less))
    is_before_XX = is_less_XX | (is_equal_XX & (at_X < at_X[:, None]))
    place_X = jnp.sum(is_before_XX, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place_X == at_X[:, None], at_X, 0), axis=1), place_X


def summed(terms: Iterable[Any]) -> Any:
    """Returns arrays' sum, taken in float32, in their dtype; XLA can fuse it, unlike a stack's."""
    first, *others = terms
    total = first.astype(jnp.float32)
    for term in others:
        total += term.astype(jnp.float32)
    return total.astype(first.dtype)


def in_turns(
    size: int, most: int, count: Callable[[], Any], turn: Callable[[Any, Any], Any], carry: Any
) -> Any:
    """Loops `carry = turn(i, carry)` over turns i = 0, 1, ... of `size` choices; returns `carry`.

    There are `count()` choices in all, known at run time; `most` is an upper bound of that.
    """
    if size >= most:
        return turn(0, carry)
    return jax.lax.fori_loop(0, (count() + size - 1) // size, turn, carry)


def turn_size(share: float, most: int) -> int:
    """Returns the number of choices of a turn: 5/4 of the expected `share`, and at most `most`."""
    return min(most, math.ceil(share * 5 / 4))


class _Choices(NamedTuple):
    """The choices of experts that are on this device, sorted by expert and cut into turns."""

    order_X: Any  # the choices, sorted; those of experts that are elsewhere are last
    place_TC: Any  # where each row's choices are in that order
    ends_E: Any  # where each expert's choices end
    # choices, size, most: choices of each row, of a turn, and that there may be
    choices: int
    size: int
    most: int

    @staticmethod
    def of(chosen_BSC: Any, numbers_E: Any, count: int) -> "_Choices":
        chosen_X, here = chosen_BSC.reshape(-1), numbers_E.shape[0]
        is_chosen_XE = (chosen_X[:, None] == numbers_E) & (numbers_E > 0)
        of_E = jnp.arange(here, dtype=jnp.int32)
        key_X = jnp.min(jnp.where(is_chosen_XE, of_E, here), axis=1)
        ends_E = jnp.sum(key_X[:, None] <= of_E, axis=0, dtype=jnp.int32)
        choices, total = chosen_BSC.shape[-1], chosen_X.shape[0]
        order_X, place_X = sorted_by(key_X)
        most = total // choices * min(choices, here)  # no row chooses an expert twice
        size = turn_size(total * here / count, most)
        return _Choices(order_X, place_X.reshape(-1, choices), ends_E, choices, size, most)

    def turn(self, i: Any) -> Turn:
        start = i * self.size
        at_R = jax.lax.dynamic_slice_in_dim(jnp.pad(self.order_X, (0, self.size)), start, self.size)
        bounds_E = jnp.clip(self.ends_E - start, 0, self.size)
        is_here_R1 = (jnp.arange(self.size) < bounds_E[-1])[:, None]
        return Turn(at_R, at_R // self.choices, is_here_R1, bounds_E)

    def summed(self, i: Any, x_RH: Any) -> Any:
        """Returns (T, H): for each row, the sum of turn `i`'s results (`x_RH`) for its choices."""
        return summed(self._found(i, c, x_RH) for c in range(self.choices))

    def returned(self, i: Any, x_R: Any) -> Any:
        return jnp.stack([self._found(i, c, x_R) for c in range(self.choices)], 1).reshape(-1)

    def _found(self, i: Any, c: int, x_R: Any) -> Any:
        """Returns (T, ...): turn `i`'s result (in `x_R`) for choice `c` of each row; 0 if none."""
        # A scatter that adds to rows has no fixed order on a GPU: runs would differ in rounding.
        at_T = self.place_TC[:, c] - i * self.size
        is_there_T = (at_T >= 0) & (at_T < self.size)
        found = x_R.at[at_T].get(mode="clip")
        return jnp.where(is_there_T.reshape(-1, *(1,) * (x_R.ndim - 1)), found, 0)

    def turns(self, turn: Callable[[Any, Any], Any], carry: Any) -> Any:
        return in_turns(self.size, self.most, lambda: self.ends_E[-1], turn, carry)


def added(x_RH: Any, gates_R: Any, part: Turn, weights: Sequence[Any], mlp: ExpertMlp) -> Any:
    """Returns (R, H): what each choice adds to its row, the expert's output times the gate."""
    out_RH = said(x_RH, part, weights, mlp)
    return out_RH * gates_R[:, None].astype(out_RH.dtype)


def more_of(count: int) -> tuple[bool, bool]:
    """Returns whether so many operands behind the weights have (2) biases, and (3) scales."""
    return count in (2, 5), count in (3, 5)


def said(x_RH: Any, part: Turn, weights: Sequence[Any], mlp: ExpertMlp) -> Any:
    """Returns (R, H): the output of each row's expert, 0 for padding; rows are sorted by expert."""
    *into, down_EHM = weights[:3]
    has_biases, has_scales = more_of(len(weights) - 3)
    biases, scales = weights[3 : 3 + 2 * has_biases], weights[3 + 2 * has_biases :]
    # No product of padding is defined: it is hidden on the way in, for the gradient's sake, and on
    # the way out.
    x_RH = jnp.where(part.is_here_R1, x_RH, 0)
    sizes_E = jnp.diff(part.ends_E, prepend=0)
    expert_R = jnp.sum(jnp.arange(len(x_RH))[:, None] >= part.ends_E, axis=1)

    def times(x_RI: Any, weights_EOI: Any, scales_EO: Sequence[Any]) -> Any:
        out_RO = mlp.product(x_RI, weights_EOI, sizes_E)
        for scale_EO in scales_EO:
            out_RO = (out_RO * scale_EO.at[expert_R].get(mode="clip")).astype(out_RO.dtype)
        return out_RO

    of_gate, of_up, of_down = ([x] for x in scales) if has_scales else ([], [], [])
    gate_RM, up_RM = times(x_RH, into[0], of_gate), times(x_RH, into[1], of_up)
    if biases:
        # A product takes each row's bias: its gradient has a fixed order, that of a gather has not.
        own_RE = jax.nn.one_hot(expert_R, len(sizes_E), dtype=x_RH.dtype)
        exactly = jax.lax.Precision.HIGHEST
        gate_RM, up_RM = (
            x + jnp.matmul(own_RE, bias_EM, precision=exactly)
            for x, bias_EM in zip((gate_RM, up_RM), biases, strict=True)
        )
    if mlp.limit:
        gate_RM, up_RM = (jnp.minimum(x, mlp.limit) for x in (gate_RM, up_RM))
        inner_RM = gate_RM * jax.nn.sigmoid(SLOPE * gate_RM) * (jnp.maximum(up_RM, -mlp.limit) + 1)
    else:
        inner_RM = jax.nn.silu(gate_RM) * up_RM
    return jnp.where(part.is_here_R1, times(inner_RM, down_EHM, of_down), 0)


def pull_of(x_RH: Any, gates_R: Any, part: Turn, weights: Sequence[Any], mlp: ExpertMlp) -> Any:
    """Returns the vjp of `added`: its result's gradient -> (rows', gates', *weights' gradients)."""

    def of(x_RH: Any, gates_R: Any, *weights: Any) -> Any:
        return added(x_RH, gates_R, part, weights, mlp)

    return jax.vjp(of, x_RH, gates_R, *weights)[1]


def with_terms(totals: Sequence[Any], terms: Sequence[Any]) -> list[Any]:
    """Returns the sum of each total and its term, in the total's dtype."""
    return [total + x.astype(total.dtype) for total, x in zip(totals, terms, strict=True)]


# On TPUs the gradient of the weights is jax's kernel (megablox), which takes each row once. XLA
# makes a product over all rows for each expert, with the rows of the others hidden: of four
# experts, four times the arithmetic.

ROWS = (512, 256, 128)  # rows of a tile; the first that divides the rows is taken

WIDTHS = (1024, 512, 256, 128)
"""Sizes of a tile along H and M, likewise. Larger tiles do not fit into a TPU's fast memory."""

INTERPRET = False  # whether to run the kernel step by step on any platform, for tests


@jax.custom_vjp
def tpu_product(x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    """Returns what `ragged` does; a TPU kernel computes the gradient of the weights."""
    return ragged(x_RI, weights_EOI, sizes_E)


def _tpu_backward(kept: Any, dout_RO: Any) -> Any:
    x_RI, weights_EOI, sizes_E = kept
    tiles = _tiles(x_RI.shape, weights_EOI.shape)
    if tiles is None:
        _, pull = jax.vjp(lambda x, w: ragged(x, w, sizes_E), x_RI, weights_EOI)
        return *pull(dout_RO), None
    _, pull = jax.vjp(lambda x_RI: ragged(x_RI, weights_EOI, sizes_E), x_RI)
    (dx_RI,) = pull(dout_RO)
    # (E, O, I): for each expert the sum of its rows' outer products.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # takes long to import

    dtype, columns_OR = weights_EOI.dtype, dout_RO.swapaxes(0, 1)
    how = {"preferred_element_type": dtype, "tiling": tiles, "interpret": INTERPRET}
    return dx_RI, tgmm(columns_OR, x_RI, sizes_E, **how), None


tpu_product.defvjp(lambda *operands: (tpu_product(*operands), operands), _tpu_backward)


def _tiles(rows: tuple[int, ...], weights: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Returns the kernel's tile (of R, of O, of I); None for a single expert or if none divide."""
    count, outer, inner = weights
    wanted = ((rows[0], ROWS), (outer, WIDTHS), (inner, WIDTHS))
    found = [next((tile for tile in tiles if not size % tile), None) for size, tiles in wanted]
    if count == 1 or None in found:
        return None
    length, height, width = (tile for tile in found if tile is not None)
    return length, height, width
