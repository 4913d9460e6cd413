"""Attention by cuDNN's fused kernel: the primitives that `jax.nn.dot_product_attention` binds.

It takes 16-bit floats and heads of a width of at most 128, from Hopper on 256, a multiple of 8. On
an H200 8,192 tokens of 16 heads of 192 take 0.8 ms, 9.1 in `attention_reference`. It applies a
causal mask over whole sequences itself, with a window or without. Segments, and the mask of a part
of the queries, are a bias that is added to the scores: (1, 1, S, T) or (B, 1, S, T) in 16 bits, the
same for all heads. With a bias the kernel takes no window, which is then in the bias, too. Anything
else is computed by `attention_reference`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.ops.attention_reference import Spec

try:  # jax has no public name for the gradient that takes what the forward pass kept
    from jax._src.cudnn import fused_attention_stablehlo as fused
except ImportError:  # pragma: no cover (a jax without it)
    fused = None  # type: ignore[assignment]

WIDEST_HEAD, WIDEST_ON_HOPPER = 128, 256
HOPPER = 9.0  # its compute capability
_HIDDEN = {"bfloat16": -2.0 * (1 << 40), "float16": -2.0 * (1 << 14)}
"""Dtype -> what is added to the score of a key that is not seen; jax uses the same numbers."""


@functools.cache
def capability() -> float:
    """The compute capability of the default device; 0 if it is no GPU of NVIDIA."""
    is_gpu = jax.default_backend() == "gpu"
    return float(getattr(jax.devices()[0], "compute_capability", 0.0)) if is_gpu else 0.0


def forward(q_BSND: Any, k_BTKD: Any, v_BTKD: Any, *masks: Any, **attributes: Any) -> Any:
    """Returns what `attention_reference.forward` does; NotImplemented if cuDNN has no kernel."""
    tensors, spec = (q_BSND, k_BTKD, v_BTKD), Spec(**attributes)
    return _call("_dot_product_attention_fwd_p", tensors, (), masks, spec, is_training=True)


def gradient(*operands: Any, **attributes: Any) -> Any:
    """Returns what `attention_reference.gradient` does; NotImplemented if cuDNN has no kernel."""
    q_BSND, k_BTKD, v_BTKD, out_BSND, lse_BNS, dout_BSND, *masks = operands
    tensors, kept = (q_BSND, k_BTKD, v_BTKD), (lse_BNS, out_BSND, dout_BSND)
    return _call("_dot_product_attention_bwd_p", tensors, kept, masks, Spec(**attributes))


def _call(primitive: str, tensors: Any, kept: Any, masks: Any, spec: Spec, **more: Any) -> Any:
    """Returns (out, lse) or (dq, dk, dv), or NotImplemented; `kept` is () or (lse, out, dout)."""
    q_BSND, k_BTKD, _ = tensors
    (_, queries, _, width), keys = q_BSND.shape, k_BTKD.shape[1]
    is_whole = queries == spec.length == keys
    has_bias = spec.segments or (spec.causal and not is_whole)
    if (
        fused is None
        or q_BSND.dtype.name not in _HIDDEN
        or spec.logits_dtype != "float32"
        or width > (WIDEST_ON_HOPPER if capability() >= HOPPER else WIDEST_HEAD)
        or width % 8
        or (has_bias and (queries % 2 or keys % 2))  # jax's own condition for gradients
        or 0 in (*q_BSND.shape, *k_BTKD.shape)
    ):
        return NotImplemented
    unused = bias = jnp.zeros(0, q_BSND.dtype)
    mask, mask_type = spec.mask(masks, keys), fused.MaskType.NO_MASK
    if spec.causal and is_whole:  # the kernel's own causal mask
        mask_type = fused.MaskType.CAUSAL
        if spec.window is None:
            mask = mask._replace(positions_S=None)
    if has_bias:
        hidden = np.asarray(_HIDDEN[q_BSND.dtype.name], q_BSND.dtype)
        visible_BST = mask.visible(keys, spec.window)
        bias = jnp.where(visible_BST[:, None], np.zeros((), q_BSND.dtype), hidden)
    window = spec.window if spec.window is not None and spec.window < keys else None
    results = getattr(fused, primitive).bind(
        *tensors,
        bias,
        *((unused,) * 6),
        *kept,
        scale=spec.scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(has_bias, has_bias),  # jax always asks for a bias's gradient
        mask_type=mask_type,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=None if has_bias else window,
        **more,
    )
    return tuple(results[:3])  # without the gradient of the bias
