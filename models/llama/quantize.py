"""Weight-only quantization to 8-bit and 4-bit integers and 8-bit floats.

Shapes are in the names: O, I out and in, Q groups of I, W half a group's width.

Projections and the output head are quantized; the embedding, norms and biases are not. Each row of
outputs has a scale, or with 4 bits each group of 128 neighbours in a row. A scale is the largest
magnitude divided by the dtype's largest number, so nothing is clipped; values are rounded to the
nearest.

    int8, row [0.5, -2.0, 1.27]    scale 2.0 / 127, values [32, -127, 81]
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from spmd.models.llama.config import ConfigError, LlamaConfig

Array = npt.NDArray[Any]

GROUP = 128
QUANTIZATIONS = ("none", "int8", "int4", "fp8")
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")

INT8_MAX, INT4_MAX = 127.0, 7.0
FP8 = ml_dtypes.float8_e4m3fn
FP8_MAX = float(ml_dtypes.finfo(FP8).max)


def quantize_weight(weight_OI: Any, kind: str) -> dict[str, Array]:
    """Quantizes one matrix, of numpy or of jax: inside a program, too, to the same numbers.

    With 8 bits there may be dims before those of a matrix, as of experts.

    Args:
        kind: `int8`, `int4` or `fp8`.

    Returns:
        `values` and `scales`, as `spmd.ops.linear` takes them.

    Raises:
        ConfigError: the kind is unknown, or groups of 4-bit values do not divide the width.
    """
    xp: Any = jnp if isinstance(weight_OI, jax.Array) else np
    rows_OI = xp.asarray(weight_OI).astype(np.float32)
    if kind == "int4":
        return _int4(rows_OI, xp)
    if kind not in ("int8", "fp8"):
        raise ConfigError(f"no quantization is called {kind!r}; there are {QUANTIZATIONS}")
    scales_O = _scales(rows_OI, INT8_MAX if kind == "int8" else FP8_MAX, xp)
    scaled_OI = rows_OI * (1 / scales_O)[..., None]
    values_OI = xp.rint(scaled_OI).astype(np.int8) if kind == "int8" else scaled_OI.astype(FP8)
    return {"values": values_OI, "scales": scales_O}


def _int4(rows_OI: Any, xp: Any) -> dict[str, Array]:
    outputs, inputs = rows_OI.shape
    group = min(GROUP, inputs)
    if inputs % group or group % 2:
        raise ConfigError(
            f"int4: rows of {inputs} weights do not divide into groups of {group}; use int8"
        )
    groups_OQI = rows_OI.reshape(outputs, inputs // group, group)
    scales_OQ = _scales(groups_OQI, INT4_MAX, xp)
    values_OQI = (xp.rint(groups_OQI * (1 / scales_OQ)[..., None]) + 8).astype(np.uint8)
    return {"values": pack_groups(values_OQI), "scales": scales_OQ}


def pack_groups(values_OQI: Any) -> Any:
    """4-bit numbers in groups -> (O, Q, W)."""
    # A byte holds entry i of the group's first half (low bits) and of its second half (high bits):
    # unpacking is one concatenation, where pairs of neighbours would have to be interleaved.
    width = values_OQI.shape[-1] // 2
    low_OQW, high_OQW = values_OQI[..., :width], values_OQI[..., width:]
    return low_OQW | (high_OQW << 4)


def dequantize(weight: Mapping[str, Any]) -> Array:
    """The matrix (O, I) in float32 that a quantized one stands for, also one of `packed.py`."""
    values, scales = np.asarray(weight["values"]), np.asarray(weight["scales"], np.float32)
    if values.dtype == np.uint8:
        values = np.concatenate([values & 15, values >> 4], axis=-1).astype(np.int8) - np.int8(8)
    wide = values.astype(np.float32)
    if "zeros" in weight:
        wide -= np.asarray(weight["zeros"], np.float32)[..., None]
    whole_OI: Array = (wide * scales[..., None]).reshape(len(values), -1)
    return whole_OI[:, np.argsort(weight["order"])] if "order" in weight else whole_OI


def _scales(rows: Any, largest: float, xp: Any) -> Any:
    """Scales over the last dim; 1 where all values are 0."""
    # XLA multiplies by the inverse of what it should divide by: so does numpy, here and above.
    scales = xp.max(xp.abs(rows), axis=-1) * np.float32(1 / largest)
    return xp.where(scales > 0, scales, np.float32(1))


def quantize(weights: Any, kind: str, of: Callable[[Any, str], Any] = quantize_weight) -> Any:
    """Quantizes the weights of a model with layers unrolled.

    Args:
        weights: as `fresh.init` makes them with `scan_layers=False`; leaves are arrays, or whatever
            `of` takes.
        kind: one of `QUANTIZATIONS`.
        of: quantizes one matrix, or returns something that does so when it is read.

    Raises:
        ConfigError: the model has latent attention, or experts and 4 bits are asked for.
    """
    if kind == "none":
        return weights

    def visit(tree: Any, name: str) -> Any:
        if name == "kv_b_proj":
            raise ConfigError(f"{kind}: weights of latent attention cannot be quantized; use none")
        if name == "experts" and kind == "int4":
            raise ConfigError("int4: weights of experts cannot be quantized so; use int8 or fp8")
        if name in QUANTIZED and "weight" in tree:
            return {k: x for k, x in tree.items() if k != "weight"} | of(tree["weight"], kind)
        if not isinstance(tree, Mapping):
            return tree
        return {key: visit(value, key) for key, value in tree.items()}

    return visit(weights, "")


def quantized_types(config: LlamaConfig, kind: str) -> Any:
    """The result of `quantize` as `jax.ShapeDtypeStruct`s."""
    from spmd.models.llama.fresh import init

    types = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    return quantize(types, kind, lambda leaf, kind: weight_types(leaf.shape, kind))


def weight_types(shape: tuple[int, ...], kind: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The result of `quantize_weight` as `jax.ShapeDtypeStruct`s."""
    if kind != "int4":
        return {
            "values": jax.ShapeDtypeStruct(shape, jnp.int8 if kind == "int8" else FP8),
            "scales": jax.ShapeDtypeStruct(shape[:-1], np.float32),
        }
    outputs, inputs = shape
    group = min(GROUP, inputs)
    return {
        "values": jax.ShapeDtypeStruct((outputs, inputs // group, group // 2), np.uint8),
        "scales": jax.ShapeDtypeStruct((outputs, inputs // group), np.float32),
    }
