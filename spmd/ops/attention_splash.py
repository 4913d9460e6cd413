"""Attention by jax's splash kernel, for TPUs, which skips blocks of scores that are masked.

It takes sequences that `BLOCKS` divide, heads of `WIDTHS`, and causal masks over whole sequences.
Positions of a part of the queries are known at run time only: `attention_reference` takes those.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.ops.attention_reference import Spec

LANES = 128  # sequences must be multiples of this
BLOCKS = (512, 256, LANES)  # sizes of a block; the first that divides a sequence is taken
WIDTHS = (64, 128, 192, 256)  # widths of a head; 192 is that of latent attention
INTERPRET = False  # whether to run kernels step by step on any platform, for tests


def forward(q_BSND: Any, k_BTKD: Any, v_BTKD: Any, *masks: Any, **attributes: Any) -> Any:
    """Returns (output, logsumexp) like `attention_reference`; NotImplemented if no kernel fits."""
    spec = Spec(**attributes)
    kernel = _kernel(q_BSND, k_BTKD, spec, save_residuals=True)
    if kernel is None:
        return NotImplemented
    q, k, v = map(_heads_first, (_scaled(q_BSND, spec), k_BTKD, v_BTKD))

    def one(q: Any, k: Any, v: Any, segments: Any) -> Any:
        out, (lse,) = kernel(q, k, v, segment_ids=segments)
        return out, lse

    out_BNSD, lse_BNS = jax.vmap(one)(q, k, v, _segments(masks, spec))
    return _heads_first(out_BNSD).astype(q_BSND.dtype), lse_BNS.astype(jnp.float32)


def gradient(*operands: Any, **attributes: Any) -> Any:
    """Returns what `attention_reference.gradient` does; NotImplemented if splash has no kernel."""
    q_BSND, k_BTKD, v_BTKD, out_BSND, lse_BNS, dout_BSND, *masks = operands
    spec = Spec(**attributes)
    kernel = _kernel(q_BSND, k_BTKD, spec, save_residuals=False)
    if kernel is None:
        return NotImplemented
    tensors = (_scaled(q_BSND, spec), k_BTKD, v_BTKD, out_BSND, dout_BSND)
    q, k, v, out, dout = map(_heads_first, tensors)

    def one(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, segments: Any) -> Any:
        kept = (q, k, v, segments, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
        return _splash()._splash_attention_bwd(**kernel.kwargs, res=kept, do=dout)[3:6]

    # The kernel knows no scale: q comes in multiplied by it, so its gradient has to be, too.
    dq, dk, dv = jax.vmap(one)(q, k, v, out, lse_BNS, dout, _segments(masks, spec))
    dq = _heads_first(dq).astype(jnp.float32) * spec.scale
    return dq.astype(q_BSND.dtype), *(_heads_first(x).astype(k_BTKD.dtype) for x in (dk, dv))


def _kernel(q_BSND: Any, k_BTKD: Any, spec: Spec, *, save_residuals: bool) -> Any:
    """Returns the kernel for such operands, or None; with `save_residuals` it gives logsumexp."""
    batch, queries, heads, width = q_BSND.shape
    shape = (queries, k_BTKD.shape[1])
    if (
        q_BSND.dtype.name not in ("bfloat16", "float32")
        or spec.logits_dtype != "float32"
        or width not in WIDTHS
        or not batch
        or any(size == 0 or size % LANES for size in shape)
        or (spec.causal and queries != spec.length)
    ):
        return None
    # Pallas is not loaded before a TPU asks for it.
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

    from spmd.ops import splash_masks as masks

    mask: Any = masks.Causal(shape) if spec.causal else masks.Full(shape)
    if spec.window is not None:
        mask = masks.SlidingWindow(shape, spec.window)
    rows, columns = (next(b for b in BLOCKS if size % b == 0) for size in shape)
    splash = _splash()
    return splash.make_splash_mha(
        MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=save_residuals,
        interpret=INTERPRET,
        block_sizes=splash.BlockSizes(
            **{f"block_q{name}": rows for name in ("", "_dkv", "_dq")},
            **{f"block_kv{name}": columns for name in ("", "_dkv", "_dq")},
            **{f"block_kv{name}_compute": columns for name in ("", "_dkv")},
        ),
    )


def _splash() -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def _scaled(q_BSND: Any, spec: Spec) -> Any:
    return q_BSND * jnp.asarray(spec.scale, q_BSND.dtype)


def _segments(masks: Any, spec: Spec) -> Any:
    return _splash().SegmentIds(*masks[-2:]) if spec.segments else None


def _heads_first(x: Any) -> Any:
    """Swaps positions and heads: (B, S, N, D) <-> (B, N, S, D)."""
    return jnp.swapaxes(x, 1, 2)
