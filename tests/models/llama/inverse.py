"""What undoes `parameters.unstack_layers` and `quantize.quantize_weight` of `spmd.models.llama`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.models.llama.parameters import Params, on_stacks

Array = np.ndarray[Any, Any]


def stack_layers(params: Params) -> Params:
    """Parameters of an unrolled model -> those of a scanned one."""

    def stacked(layers: Params) -> Params:
        ordered = [layers[str(index)] for index in range(len(layers))]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)

    return on_stacks(stacked, params)


def dequantize(weight: Mapping[str, Any]) -> Array:
    """The matrix (O, I) in float32 that `values` and `scales` stand for."""
    values, scales = np.asarray(weight["values"]), np.asarray(weight["scales"])
    if values.ndim == 2:
        rows: Array = values.astype(np.float32) * scales[:, None]
        return rows
    both_OQI = np.concatenate([values & 15, values >> 4], axis=-1).astype(np.float32) - 8
    whole: Array = (both_OQI * scales[..., None]).reshape(values.shape[0], -1)
    return whole
