"""`experts`: a mixture of gated experts over rows that have chosen some, one op to the compiler.

Shapes are in the names:

    B, S dims of the rows    H width of a row    C choices of each row
    E experts    M width inside an expert    T all rows (B * S)
    X choices of all rows (B * S * C)    R choices that are computed at a time

Rows are sorted by their expert and multiplied by `jax.lax.ragged_dot`, on GPUs by a kernel of ours
(`ragged_triton`): there is no capacity, and no row is dropped. Sorting depends on the numbers, so a
partitioner that looks into it sees gathers from anywhere, and has to bring all rows together. Under
`spmd.jit` the op stays whole. One device can compute it for any of the rows and any of the experts,
and what it finds is then a summand:

    rows are split       every device has its own rows and all experts (they are gathered)
    experts are split    every device has all rows of its group (they are gathered) and its own
                         experts; results are summed, each where it is needed
    M is split           as in any MLP: results are summed

The planner takes what sends least. Rows are not sent to their experts alone: any device may be
chosen by all rows, and an exchange whose sizes are known before it runs would have to be large
enough for that, C times what the gather sends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from spmd.errors import ArgumentError
from spmd.ir.dialect.composites import arguments_of
from spmd.ir.program import OpKind
from spmd.lowering.register import register_composite
from spmd.ops import ragged_triton

FORWARD = "spmd.experts"
GRADIENT = "spmd.experts_grad"

Product = Callable[[Any, Any, Any], Any]
"""(rows (R, I) sorted by expert, weights (E, O, I), rows of each expert) -> (R, O)."""

PLATFORMS = ("cpu", "cuda", "tpu")
"""On all of them what one device computes stays a function of its own, so that its time is that of
the rows that are expected, and not of those that there is room for."""


def experts(
    x_BSH: Any, gates_BSC: Any, chosen_BSC: Any, gate_EMH: Any, up_EMH: Any, down_EHM: Any
) -> jax.Array:
    """The sum of each row's chosen experts, `down(silu(gate(x)) * up(x))`, times their gates.

    Args:
      x_BSH: rows.
      gates_BSC: the weight of each choice, in any float dtype.
      chosen_BSC: the experts, integers from 0 to E - 1; no row chooses one twice.
      gate_EMH: each expert's weights, in the dtype of the rows.
      up_EMH: likewise.
      down_EHM: likewise.

    Returns:
      (B, S, H) in the dtype of the rows.

    Raises:
      ArgumentError: shapes or dtypes that do not fit each other.

    Example:
      >>> gates_BSC, chosen_BSC = jax.lax.top_k(jax.nn.softmax(logits_BSE), 2)
      >>> out_BSH = experts(x_BSH, gates_BSC, chosen_BSC, gate_EMH, up_EMH, down_EHM)
    """
    _check(x_BSH, gates_BSC, chosen_BSC, gate_EMH, up_EMH, down_EHM)
    # The experts' numbers are an operand so that a device with some of them knows which; 0 is none.
    numbers_E = jnp.arange(1, gate_EMH.shape[0] + 1, dtype=jnp.int32)
    chosen_BSC = chosen_BSC.astype(jnp.int32) + 1
    out_BSH: jax.Array = _mix(x_BSH, gates_BSC, chosen_BSC, numbers_E, gate_EMH, up_EMH, down_EHM)
    return out_BSH


def forward(
    x_BSH: Any,
    gates_BSC: Any,
    chosen_BSC: Any,
    numbers_E: Any,
    *weights: Any,
    count: int,
    product: Product | None = None,
) -> Any:
    """What the experts at hand, whose numbers are given, add to the rows at hand.

    Args:
      x_BSH, gates_BSC: as for `experts`.
      chosen_BSC, numbers_E: from 1 on; 0 is none.
      *weights: gate, up and down of the experts at hand.
      count: how many experts there are in all.
      product: what multiplies rows with the weights of their experts.
    """
    choices = _Choices.of(chosen_BSC, numbers_E, count)
    x_TH, gates_X = x_BSH.reshape(-1, x_BSH.shape[-1]), gates_BSC.reshape(-1)

    def turn(i: Any, out_TH: Any) -> Any:
        part = choices.turn(i)
        added_RH = _added(x_TH[part.row_R], gates_X[part.at_R], part, weights, product)
        return out_TH + choices.summed(i, added_RH)

    return choices.turns(turn, jnp.zeros_like(x_TH)).reshape(x_BSH.shape)


def gradient(*operands: Any, count: int, product: Product | None = None) -> Any:
    """Gradients of rows, gates and weights: the operands are those of `forward`, and its `dout`."""
    x_BSH, gates_BSC, chosen_BSC, numbers_E, *weights, dout_BSH = operands
    choices = _Choices.of(chosen_BSC, numbers_E, count)
    x_TH, dout_TH = (x.reshape(-1, x.shape[-1]) for x in (x_BSH, dout_BSH))
    gates_X = gates_BSC.reshape(-1)

    def turn(i: Any, sums: Any) -> Any:
        part = choices.turn(i)

        def added(x_RH: Any, gates_R: Any, *weights: Any) -> Any:
            return _added(x_RH, gates_R, part, weights, product)

        _, pull = jax.vjp(added, x_TH[part.row_R], gates_X[part.at_R], *weights)
        dx_RH, dgates_R, *dweights = pull(dout_TH[part.row_R])
        dx_TH, dgates_X, *before = sums
        return (
            dx_TH + choices.summed(i, dx_RH),
            dgates_X + choices.returned(i, dgates_R),
            *(total + x.astype(total.dtype) for total, x in zip(before, dweights, strict=True)),
        )

    nothing = (jnp.zeros_like(x_TH), jnp.zeros_like(gates_X))
    zeros = (jnp.zeros(x.shape, jnp.float32) for x in weights)
    dx_TH, dgates_X, *dweights = choices.turns(turn, (*nothing, *zeros))
    found = (total.astype(x.dtype) for total, x in zip(dweights, weights, strict=True))
    return dx_TH.reshape(x_BSH.shape), dgates_X.reshape(gates_BSC.shape), *found


class _Part(NamedTuple):
    """The choices of one turn.

    Attributes:
      at_R: their places among all choices.
      row_R: the rows that made them.
      is_here_R1: whether there is such a choice; the last ones are padding.
      sizes_E: how many there are of each expert at hand, one expert behind the other.
    """

    at_R: Any
    row_R: Any
    is_here_R1: Any
    sizes_E: Any


class _Choices(NamedTuple):
    """The choices of experts at hand, sorted by these, taken in turns.

    All rows may choose experts at hand, but that is seldom: a turn has as many choices as there are
    if experts are chosen alike, and a quarter more, and mostly there is one.

    Attributes:
      order_X: the choices, sorted; those of experts that are elsewhere are last.
      place_TC: where each row's choices are in that order.
      ends_E: where each expert's choices end.
      choices: of each row.
      size: choices of a turn.
      most: choices that there may be.
    """

    order_X: Any
    place_TC: Any
    ends_E: Any
    choices: int
    size: int
    most: int

    @staticmethod
    def of(chosen_BSC: Any, numbers_E: Any, count: int) -> _Choices:
        chosen_X, here = chosen_BSC.reshape(-1), numbers_E.shape[0]
        is_chosen_XE = (chosen_X[:, None] == numbers_E) & (numbers_E > 0)
        place_X = jnp.where(jnp.any(is_chosen_XE, 1), jnp.argmax(is_chosen_XE, 1), here)
        ends_E = jnp.cumsum(jnp.sum(is_chosen_XE, axis=0, dtype=jnp.int32))
        choices, total = chosen_BSC.shape[-1], chosen_X.shape[0]
        order_X = jnp.argsort(place_X, stable=True)
        places_X = jnp.arange(total, dtype=order_X.dtype)
        sorted_X = jnp.zeros_like(order_X).at[order_X].set(places_X, unique_indices=True)
        most = total // choices * min(choices, here)  # no row chooses an expert twice
        size = min(most, -(-total * here * 5 // (count * 4)))
        place_TC = sorted_X.reshape(-1, choices)
        return _Choices(order_X, place_TC, ends_E, choices, size, most)

    def turn(self, i: Any) -> _Part:
        """The choices of turn `i`."""
        start = i * self.size
        padded = jnp.pad(self.order_X, (0, self.size))
        at_R = jax.lax.dynamic_slice_in_dim(padded, start, self.size)
        bounds_E = jnp.clip(self.ends_E - start, 0, self.size)
        is_here_R1 = (jnp.arange(self.size) < bounds_E[-1])[:, None]
        sizes_E = jnp.diff(bounds_E, prepend=0)
        return _Part(at_R, at_R // self.choices, is_here_R1, sizes_E)

    def summed(self, i: Any, x_RH: Any) -> Any:
        """(T, H): the sum of what turn `i` has found for each row's choices."""
        shape = (self.place_TC.shape[0], x_RH.shape[1])
        # Term by term: XLA would write all terms of one reduction before it adds them.
        found = (self._found(i, c, x_RH).astype(jnp.float32) for c in range(self.choices))
        return sum(found, jnp.zeros(shape, jnp.float32)).astype(x_RH.dtype)

    def returned(self, i: Any, x_R: Any) -> Any:
        """(X,) of what turn `i` has found for each choice."""
        return jnp.stack([self._found(i, c, x_R) for c in range(self.choices)], 1).reshape(-1)

    def _found(self, i: Any, c: int, x_R: Any) -> Any:
        """(T, ...) of each row's choice `c`; 0 if turn `i` did not have it.

        Adding to rows in the order of the choices would be in no order on a GPU, and so not give
        the same twice.
        """
        at_T = self.place_TC[:, c] - i * self.size
        is_there_T = (at_T >= 0) & (at_T < self.size)
        found = x_R.at[at_T].get(mode="clip")
        return jnp.where(is_there_T.reshape(-1, *(1,) * (x_R.ndim - 1)), found, 0)

    def turns(self, turn: Callable[[Any, Any], Any], carry: Any) -> Any:
        """As many turns as it takes."""
        if self.size >= self.most:
            return turn(0, carry)
        needed = (self.ends_E[-1] + self.size - 1) // self.size
        return jax.lax.fori_loop(0, needed, turn, carry)


def _added(
    x_RH: Any, gates_R: Any, part: _Part, weights: Sequence[Any], product: Product | None
) -> Any:
    """What each choice adds to its row."""
    product = product or _ragged
    gate_EMH, up_EMH, down_EHM = weights
    # No product of padding is defined: it is hidden on the way in, for the gradient's sake, and on
    # the way out.
    x_RH = jnp.where(part.is_here_R1, x_RH, 0)
    gate_RM, up_RM = (product(x_RH, weight, part.sizes_E) for weight in (gate_EMH, up_EMH))
    out_RH = product(jax.nn.silu(gate_RM) * up_RM, down_EHM, part.sizes_E)
    return jnp.where(part.is_here_R1, out_RH, 0) * gates_R[:, None].astype(out_RH.dtype)


_BY_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


def _ragged(x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    """Each row times its expert's weights, as XLA multiplies them."""
    return jax.lax.ragged_dot_general(x_RI, weights_EOI, sizes_E, _BY_ROWS)


def _on_gpus(x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    """The same, by a kernel for those that it takes."""
    found = ragged_triton.product(x_RI, weights_EOI, sizes_E)
    return _ragged(x_RI, weights_EOI, sizes_E) if found is NotImplemented else found


@jax.custom_vjp
def _mix(*operands: Any) -> Any:
    return _run(FORWARD, forward, operands)


def _mix_forward(*operands: Any) -> tuple[Any, tuple[Any, ...]]:
    # Products are computed again in the backward pass: kept, they would be M / H times the rows.
    return _mix(*operands), operands


def _mix_backward(operands: tuple[Any, ...], dout_BSH: Any) -> tuple[Any, ...]:
    dx, dgates, *dweights = _run(GRADIENT, gradient, (*operands, dout_BSH))
    return dx, dgates, None, None, *dweights


_mix.defvjp(_mix_forward, _mix_backward)


def _run(name: str, function: Any, operands: tuple[Any, ...]) -> Any:
    """The function as a composite; `jax.vmap` computes one after the other."""
    count = operands[3].shape[0]

    @custom_vmap
    def run(*operands: Any) -> Any:
        return jax.lax.composite(function, name)(*operands, count=count)

    @run.def_vmap  # type: ignore[untyped-decorator]
    def mapped(size: int, batched: Any, *operands: Any) -> Any:
        del size

        def one(some: Any) -> Any:
            rest = iter(some)
            given = zip(operands, batched, strict=True)
            return run(*(next(rest) if is_batched else x for x, is_batched in given))

        each = [x for x, is_batched in zip(operands, batched, strict=True) if is_batched]
        results = jax.lax.map(one, each)
        return results, jax.tree.map(lambda _: True, results)

    return run(*operands)


def _flops(kind: OpKind, products: int) -> float:
    """Of so many products of each chosen row: of all choices, the share of the experts at hand."""
    (batch, length, width), (_, _, choices) = (t.shape for t in kind.operands[:2])
    here, inner, _ = kind.operands[4].shape
    rows = batch * length * choices * here / int(arguments_of(kind)["count"])
    return 2.0 * products * rows * width * inner


def _kernels(function: Any) -> dict[str, Any]:
    """Platform -> what one device computes."""
    return dict.fromkeys(PLATFORMS, function) | {
        "cuda": functools.partial(function, product=_on_gpus)
    }


_OPERANDS = "b s h, b s c, b s c, e, e m h, e m h, e h m"
_WHOLE = {"h": "replicate", "c": "replicate", "e": "reduce", "m": "reduce"}

register_composite(
    FORWARD,
    f"{_OPERANDS} -> b s h",
    kernels=_kernels(forward),
    kinds=_WHOLE,
    reduction="add",
    flops=functools.partial(_flops, products=3),
)
register_composite(
    GRADIENT,
    f"{_OPERANDS}, b s h -> b s h, b s c, e m h, e m h, e h m",
    kernels=_kernels(gradient),
    kinds={**_WHOLE, "b": "reduce", "s": "reduce"},
    reduction="add",
    flops=functools.partial(_flops, products=9),
)


def _check(x: Any, gates: Any, chosen: Any, gate: Any, up: Any, down: Any) -> None:
    """Raises ArgumentError where something does not fit."""
    ranks = (x.ndim, gates.ndim, chosen.ndim, gate.ndim, up.ndim, down.ndim) == (3,) * 6
    fits = ranks and gates.shape == chosen.shape and gates.shape[:2] == x.shape[:2]
    fits = fits and gate.shape == up.shape and gate.shape[2] == x.shape[2]
    fits = fits and down.shape == (gate.shape[0], gate.shape[2], gate.shape[1])
    fits = fits and x.dtype == gate.dtype == up.dtype == down.dtype
    fits = fits and jnp.issubdtype(chosen.dtype, jnp.integer)
    if not fits:
        arrays = {"x": x, "gates": gates, "chosen": chosen, "gate": gate, "up": up, "down": down}
        raise ArgumentError(
            "experts cannot be computed",
            actual=", ".join(f"{name} {a.dtype} {a.shape}" for name, a in arrays.items()),
            required="x (B, S, H), gates (B, S, C), chosen (B, S, C) of integers, gate and up "
            "(E, M, H), down (E, H, M), rows and weights of one dtype",
            fix="correct them",
        )
