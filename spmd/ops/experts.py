"""`experts`: a mixture of gated experts over rows that have chosen some, one op to the compiler.

Shapes are in the names:

    B, S dims of the rows    H width of a row    C choices of each row
    E experts    M width inside an expert
    X choices of all rows (B * S * C)    R the most of them that can be of the experts at hand

Rows are sorted by their expert and multiplied by `jax.lax.ragged_dot`: there is no capacity, and no
row is dropped. Sorting depends on the numbers, so a partitioner that looks into it sees gathers
from anywhere, and has to bring all rows together. Under `spmd.jit` the op stays whole. One device
can compute it for any of the rows and any of the experts, and what it finds is then a summand:

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
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from spmd.errors import ArgumentError
from spmd.ir.dialect.composites import arguments_of
from spmd.ir.program import OpKind
from spmd.lowering.register import register_composite

FORWARD = "spmd.experts"
GRADIENT = "spmd.experts_grad"


def experts(
    x_BSH: Any, gates_BSC: Any, chosen_BSC: Any, gate_EMH: Any, up_EMH: Any, down_EHM: Any
) -> jax.Array:
    """The sum of each row's chosen experts, `down(silu(gate(x)) * up(x))`, times their gates.

    Args:
      x_BSH: rows.
      gates_BSC: the weight of each choice, in any float dtype.
      chosen_BSC: the experts, integers from 0 to E - 1; no row chooses one twice.
      gate_EMH, up_EMH, down_EHM: the experts' weights, in the dtype of the rows.

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
    gate_EMH: Any,
    up_EMH: Any,
    down_EHM: Any,
    *,
    count: int,
) -> Any:
    """What the experts at hand, whose numbers are given, add to the rows at hand."""
    del count
    width, choices = x_BSH.shape[-1], chosen_BSC.shape[-1]
    order_X, sizes_E = _sorted(chosen_BSC.reshape(-1), numbers_E)
    # No row chooses an expert twice.
    order_R = order_X[: order_X.shape[0] // choices * min(choices, numbers_E.shape[0])]
    row_R = order_R // choices
    # Rows of experts that are elsewhere are the last ones, of which no product is defined: they are
    # hidden on the way in, for the gradient's sake, and on the way out.
    is_here_R1 = (jnp.arange(order_R.shape[0]) < jnp.sum(sizes_E))[:, None]
    x_RH = jnp.where(is_here_R1, x_BSH.reshape(-1, width)[row_R], 0)
    hidden_RM = jax.nn.silu(_product(x_RH, gate_EMH, sizes_E)) * _product(x_RH, up_EMH, sizes_E)
    out_RH = jnp.where(is_here_R1, _product(hidden_RM, down_EHM, sizes_E), 0)
    out_RH *= gates_BSC.reshape(-1)[order_R, None].astype(out_RH.dtype)
    return jnp.zeros_like(x_BSH.reshape(-1, width)).at[row_R].add(out_RH).reshape(x_BSH.shape)


def gradient(*operands: Any, count: int) -> Any:
    """Gradients of rows, gates and weights: the operands are those of `forward`, and its `dout`."""
    *given, dout_BSH = operands
    x_BSH, gates_BSC, chosen_BSC, numbers_E, *weights = given

    def run(x_BSH: Any, gates_BSC: Any, *weights: Any) -> Any:
        return forward(x_BSH, gates_BSC, chosen_BSC, numbers_E, *weights, count=count)

    return jax.vjp(run, x_BSH, gates_BSC, *weights)[1](dout_BSH)


def _sorted(chosen_X: Any, numbers_E: Any) -> tuple[Any, Any]:
    """The order of choices by the place of their expert, and how many each has; others are last."""
    is_chosen_XE = (chosen_X[:, None] == numbers_E) & (numbers_E > 0)
    places = numbers_E.shape[0]
    place_X = jnp.where(jnp.any(is_chosen_XE, axis=1), jnp.argmax(is_chosen_XE, axis=1), places)
    sizes_E = jnp.sum(is_chosen_XE, axis=0, dtype=jnp.int32)
    return jnp.argsort(place_X, stable=True), sizes_E


_BY_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


def _product(x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    """Each row times its expert's weights."""
    return jax.lax.ragged_dot_general(x_RI, weights_EOI, sizes_E, _BY_ROWS)


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


_OPERANDS = "b s h, b s c, b s c, e, e m h, e m h, e h m"
_WHOLE = {"h": "replicate", "c": "replicate", "e": "reduce", "m": "reduce"}

register_composite(
    FORWARD,
    f"{_OPERANDS} -> b s h",
    decomposition=forward,
    kinds=_WHOLE,
    reduction="add",
    flops=functools.partial(_flops, products=3),
)
register_composite(
    GRADIENT,
    f"{_OPERANDS}, b s h -> b s h, b s c, e m h, e m h, e h m",
    decomposition=gradient,
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
