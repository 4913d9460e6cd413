"""Attention by cuDNN's fused kernel: the primitives that `jax.nn.dot_product_attention` binds.

It takes 16-bit floats with heads of at most 128, a multiple of 8. A causal mask over whole
sequences is the kernel's own, with a window or without. Segments, and the mask of a part of the
queries, are a bias that is added to the scores: (1, 1, S, T) or (B, 1, S, T) in 16 bits, the same
for all heads. Beside a bias the kernel takes no window: then that is in the bias, too. For anything
else there is `attention_reference`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.ops.attention_reference import Mask

try:  # jax has no public name for the gradient that takes what the forward pass kept
    from jax._src.cudnn import fused_attention_stablehlo as fused
except ImportError:  # pragma: no cover (a jax without it)
    fused = None  # type: ignore[assignment]

WIDEST_HEAD = 128
_HIDDEN = {"bfloat16": -2.0 * (1 << 40), "float16": -2.0 * (1 << 14)}
"""The bias on the score of a key that is not seen, by dtype; jax uses the same numbers."""


def forward(q_BSND: Any, k_BTKD: Any, v_BTKD: Any, *masks: Any, **spec: Any) -> Any:
    """Computes `attention_reference.forward` by cuDNN; NotImplemented if that has no kernel."""
    tensors = (q_BSND, k_BTKD, v_BTKD)
    return _call("_dot_product_attention_fwd_p", tensors, (), masks, spec, is_training=True)


def gradient(*operands: Any, **spec: Any) -> Any:
    """Computes `attention_reference.gradient` by cuDNN; NotImplemented if that has no kernel."""
    q_BSND, k_BTKD, v_BTKD, out_BSND, lse_BNS, dout_BSND, *masks = operands
    tensors, kept = (q_BSND, k_BTKD, v_BTKD), (lse_BNS, out_BSND, dout_BSND)
    return _call("_dot_product_attention_bwd_p", tensors, kept, masks, spec)


def _call(primitive: str, tensors: Any, kept: Any, masks: Any, spec: Any, **more: Any) -> Any:
    """Binds one of jax's primitives: both take ten operands, then what the forward pass kept."""
    q_BSND, k_BTKD, _ = tensors
    if not takes(q_BSND, k_BTKD, spec):
        return NotImplemented
    bias, mask_type = _bias(q_BSND, k_BTKD, masks, spec)
    has_bias = bias is not None
    window = spec.get("window", k_BTKD.shape[1])
    unused = jnp.zeros(0, q_BSND.dtype)
    results = getattr(fused, primitive).bind(
        *tensors,
        bias if has_bias else unused,
        *((unused,) * 6),
        *kept,
        scale=spec["scale"],
        seed=42,
        dropout_rate=0.0,
        variadic_args=(has_bias, has_bias),  # jax always asks for a bias's gradient
        mask_type=mask_type,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=None if has_bias or window >= k_BTKD.shape[1] else window,
        **more,
    )
    return tuple(results[:3])  # without the gradient of the bias


def takes(q_BSND: Any, k_BTKD: Any, spec: Any) -> bool:
    """Whether cuDNN has a kernel for these shapes and dtypes."""
    width, queries, keys = q_BSND.shape[3], q_BSND.shape[1], k_BTKD.shape[1]
    has_bias = spec["segments"] or (spec["causal"] and not _is_own(q_BSND, k_BTKD, spec))
    return (
        fused is not None
        and q_BSND.dtype.name in _HIDDEN
        and spec["logits_dtype"] == "float32"
        and width <= WIDEST_HEAD
        and width % 8 == 0
        and not (has_bias and (queries % 2 or keys % 2))  # jax's own condition for gradients
        and 0 not in (*q_BSND.shape, *k_BTKD.shape)
    )


def _is_own(q_BSND: Any, k_BTKD: Any, spec: Any) -> bool:
    """Whether the kernel's own causal mask fits: queries and keys are of the whole sequence."""
    return bool(q_BSND.shape[1] == spec["length"] == k_BTKD.shape[1])


def _bias(q_BSND: Any, k_BTKD: Any, masks: Any, spec: Any) -> tuple[Any, Any]:
    """Returns the bias that hides keys, or None, and the mask type that the kernel applies."""
    causal = fused.MaskType.CAUSAL if spec["causal"] else fused.MaskType.NO_MASK
    mask = Mask.of(masks, causal=spec["causal"], segments=spec["segments"])
    if spec["causal"] and not _is_own(q_BSND, k_BTKD, spec):
        causal = fused.MaskType.NO_MASK
    elif spec["causal"] and not (spec["segments"] and "window" in spec):
        mask = mask._replace(positions_S=None)
    visible_BST = mask.visible(k_BTKD.shape[1], spec.get("window"))
    if visible_BST is None:
        return None, causal
    hidden = np.asarray(_HIDDEN[q_BSND.dtype.name], q_BSND.dtype)
    return jnp.where(visible_BST[:, None], np.zeros((), q_BSND.dtype), hidden), causal
