"""Masks of the splash kernel: what jax makes of them, beside jax's own, and how little they say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

from spmd.ops import attention_splash, splash_masks
from spmd.ops.attention_reference import Spec

SHAPES = [((512, 512), (128, 128)), ((512, 1024), (256, 128)), ((512, 256), (256, 128))]
SQUARE = [SHAPES[0], ((1024, 1024), (128, 256))]


def both(mask: Any, block: Any, heads: int, head_shards: int, q_shards: int) -> list[Any]:
    """The facts of the forward kernel and of the keys' gradient, and the kernel's own mask."""
    found: list[Any] = []
    for process in (infos.process_mask, infos.process_mask_dkv):
        many = jax_masks.MultiHeadMask([mask] * heads)
        info, function = process(many, block, head_shards=head_shards, q_seq_shards=q_shards)
        queries, keys = (np.arange(size) for size in mask.shape)
        seen = None if function is None else function(queries[:, None], keys[None])
        found += [*info, seen]
    return found


def assert_equal(ours: Any, jaxs: Any, block: Any, *splits: tuple[int, int]) -> None:
    """The same facts, whole and in these numbers of parts of the heads and of the queries."""
    for head_shards, q_shards in ((1, 1), (2, 1), *splits):
        cases = (both(mask, block, 2, head_shards, q_shards) for mask in (ours, jaxs))
        for mine, theirs in zip(*cases, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert np.asarray(mine).dtype == np.asarray(theirs).dtype
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_a_causal_and_a_full_mask_are_as_jaxs_are(shape: Any, block: Any) -> None:
    assert_equal(splash_masks.Causal(shape), jax_masks.CausalMask(shape), block, (1, 2))
    # jax splits the queries of no mask that hides nothing.
    assert_equal(splash_masks.Full(shape), jax_masks.FullMask(shape), block)


@pytest.mark.parametrize("size", [1, 2, 100, 128, 129, 384, 4096])
@pytest.mark.parametrize(("shape", "block"), SQUARE)
def test_a_window_is_as_jaxs_is(shape: Any, block: Any, size: int) -> None:
    theirs = jax_masks.LocalMask(shape, (size - 1, 0), offset=0)
    assert_equal(splash_masks.SlidingWindow(shape, size), theirs, block, (1, 2), (2, 4))


def test_masks_are_told_apart() -> None:
    """jax keeps what it made of a mask, and looks it up by the mask."""
    made = [
        splash_masks.Causal((256, 256)), splash_masks.Causal((256, 512)),
        splash_masks.SlidingWindow((256, 256), 1), splash_masks.SlidingWindow((256, 256), 2),
        splash_masks.Full((256, 256)), jax_masks.CausalMask((256, 256)),
    ]  # fmt: skip
    assert len(set(made)) == len(made)
    assert splash_masks.Causal((256, 256)) == made[0]
    assert splash_masks.SlidingWindow((256, 256), 2) in made


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 4096])
def test_of_131072_positions_no_block_is_written_out(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 0

    def count(self: Any, block: Any) -> Any:
        nonlocal said
        found = facts(self, block)
        said += found.size
        return found

    def written_out(self: Any, block: Any) -> Any:
        raise AssertionError("a block of 262,144 booleans")

    facts = splash_masks._Band.__getitem__
    monkeypatch.setattr(splash_masks._Band, "__getitem__", count)
    for theirs in (jax_masks._ComputableMask, jax_masks.FullMask):
        monkeypatch.setattr(theirs, "__getitem__", written_out)
    tokens, blocks = 131_072, 256
    q, k = (jax.ShapeDtypeStruct((1, tokens, n, 128), jnp.bfloat16) for n in (4, 1))
    spec = Spec(True, False, 1.0, tokens, "float32", window)
    kernel = attention_splash._kernel(q, k, spec, save_residuals=True)
    # The forward pass and the keys' gradient ask twice for each block, and get two booleans.
    assert said <= 8 * blocks**2
    if window is None:
        seen = np.asarray(kernel.fwd_mask_info.block_mask[0])
        assert seen.shape == (blocks, blocks)
        assert (seen == 2).sum() == blocks * (blocks - 1) // 2 and (seen == 1).sum() == blocks
    else:  # of each row of blocks the 9 that a window of 8 blocks reaches
        assert kernel.fwd_mask_info.block_mask.shape == (1, blocks, 9)
