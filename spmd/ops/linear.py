"""`linear`: a product with a weight that may be quantized, as each platform reads it best.

Shapes are in the names:

    B rows    I, O in and out    Q groups of I    P halves of a group    W half a group's width

The composite `spmd.linear` stays whole in the compiler, and in exported programs. With one row it
is bound by reading the weight: GPUs then take a multiplication and a sum, which XLA makes one
kernel of, conversion and scale included; with more rows, and everywhere else, a matrix product.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ArgumentError
from spmd.ir.dialect.rule import REDUCE, REPLICATE, Rule, parse_rule
from spmd.ir.program import OpKind
from spmd.lowering.register import register_composite

NAME = "spmd.linear"

NIBBLES = 2
"""Values of 4 bits in a byte: the low ones are a group's first half, the high ones its second."""


def linear(x_BI: Any, weight: Any) -> jax.Array:
    """`x @ weight.T` in the dtype of `x`, summed in float32.

    Args:
      x_BI: rows.
      weight: (O, I); or quantized, a dict of `values` and `scales`: 8-bit `values` (O, I) with
        `scales` (O,), or 4-bit ones packed in uint8 `values` (O, Q, W) with `scales` (O, Q), for
        groups of 2 W neighbours: byte j of a group holds its elements j and j + W, each plus 8.

    Returns:
      (B, O).

    Raises:
      ArgumentError: shapes that do not fit each other.

    Example:
      >>> linear(x_BI, {"values": int8_OI, "scales": scales_O})
    """
    operands = (weight["values"], weight["scales"]) if isinstance(weight, dict) else (weight,)
    values = operands[0]
    _check(x_BI, operands)
    # A byte of packed weights has an element of each half of its group: x gets the same dims,
    # (B, Q, 2, W), so that a split over groups splits both operands alike.
    if values.ndim == 3:
        x_BI = x_BI.reshape(x_BI.shape[0], values.shape[1], NIBBLES, values.shape[2])
    out_BO: jax.Array = jax.lax.composite(_decomposition, NAME)(x_BI, *operands)
    return out_BO


def _check(x: Any, operands: tuple[Any, ...]) -> None:
    values = operands[0]
    inner = values.shape[1:] if values.ndim == 2 else (NIBBLES * math.prod(values.shape[1:]),)
    fits = x.ndim == 2 and values.ndim in (2, 3) and tuple(inner) == x.shape[1:]
    if len(operands) == 2:
        fits = fits and operands[1].shape == values.shape[: values.ndim - 1]
    if not fits:
        raise ArgumentError(
            "linear cannot be computed",
            actual=f"x {x.shape}, weight {', '.join(str(v.shape) for v in operands)}",
            required="x (B, I) and (O, I); quantized (O, I), (O,) or (O, Q, W), (O, Q)",
            fix="correct the shapes",
        )


def _decomposition(x: Any, values: Any, scales: Any = None) -> Any:
    """A matrix product of `x` and the values as they are; scales come after it."""
    if values.ndim == 3:
        x_BQI = x.reshape(*x.shape[:2], -1)
        sums_BOQ = jnp.einsum(
            "bqi,oqi->boq", x_BQI, _nibbles(values, x.dtype), preferred_element_type=jnp.float32
        )
        return jnp.sum(sums_BOQ * scales.astype(jnp.float32), axis=-1).astype(x.dtype)
    out_BO = jnp.einsum("bi,oi->bo", x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    return _scaled(out_BO, scales).astype(x.dtype)


def _kernel(x: Any, values: Any, scales: Any = None) -> Any:
    """One row: multiply and sum along the weight's rows, or NotImplemented."""
    if x.shape[0] != 1:
        return NotImplemented
    row = x[0].astype(jnp.float32)
    if values.ndim == 3:
        wide = values.astype(jnp.int32)
        low, high = ((wide & 15) - 8, (wide >> 4) - 8)
        sums_OQW = low.astype(jnp.float32) * row[:, 0] + high.astype(jnp.float32) * row[:, 1]
        sums_OQW *= scales.astype(jnp.float32)[..., None]
        return jnp.sum(sums_OQW, axis=(1, 2))[None].astype(x.dtype)
    out_O = jnp.sum(values.astype(jnp.float32) * row, axis=1)
    return _scaled(out_O[None], scales).astype(x.dtype)


def _scaled(out_BO: Any, scales_O: Any) -> Any:
    return out_BO if scales_O is None else out_BO * scales_O.astype(jnp.float32)


def _nibbles(values_OQW: Any, dtype: Any) -> Any:
    """Packed 4-bit values -> (O, Q, 2 W): the bytes 0x9A 0x87 are 2 -1 1 0."""
    low, high = values_OQW & 15, values_OQW >> 4
    both = jnp.concatenate([low, high], axis=-1)
    return (both.astype(jnp.int8) - 8).astype(dtype)


def _rule(kind: OpKind) -> Rule:
    terms = ("b i", "o i", "o")
    if kind.operands[1].rank == 3:  # 4-bit values
        terms = ("b q p w", "o q w", "o q")
    return parse_rule(
        f"{', '.join(terms[: len(kind.operands)])} -> b o", kind.operands, kind.results,
        kinds={"i": REDUCE, "q": REDUCE, "p": REPLICATE, "w": REPLICATE},
        reduction="add", linear=[(0,)],
    )  # fmt: skip


def _flops(kind: OpKind) -> float:
    x, values = (t.shape for t in kind.operands[:2])
    return 2.0 * values[0] * math.prod(x)


register_composite(
    NAME, _rule, decomposition=_decomposition, kernels={"cuda": _kernel}, flops=_flops
)
