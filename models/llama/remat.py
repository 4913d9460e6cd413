"""Activation checkpointing: which activations of a layer are kept for its backward pass.

A policy is a name of `POLICIES`, or `save:` or `offload:` with names of `marks.MARK_POINTS`:

    none                  everything is kept, nothing recomputed
    full                  nothing is kept but the layer's input
    dots                  results of matrix products are kept
    dots_no_batch         the same without those of attention: products of activations by weights
    save_attention        q, k, v and attention's output: `save:q,k,v,attention_output`
    save:NAME,...         these are kept
    offload:NAME,...      these are kept in the host's memory
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from spmd.models.llama.config import ConfigError
from spmd.models.llama.marks import MARK_POINTS

Policy = Callable[..., Any]
"""What `jax.checkpoint` takes."""

SAVE_ATTENTION = "save:q,k,v,attention_output"

POLICIES: Mapping[str, Policy | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def checkpoint_policy(text: str) -> Policy | None:
    """The policy for `jax.checkpoint` that `text` names; None recomputes nothing.

    Raises:
        ConfigError: no such policy, or an unknown name in it.
    """
    if text == "save_attention":
        text = SAVE_ATTENTION
    if text in POLICIES:
        return POLICIES[text]
    kind, _, names = text.partition(":")
    if kind not in ("save", "offload") or not names:
        known = ", ".join((*POLICIES, "save_attention", "save:NAMES", "offload:NAMES"))
        raise ConfigError(f"remat {text!r} is no policy; there are {known}")
    chosen = tuple(name.strip() for name in names.split(","))
    unknown = [name for name in chosen if name not in MARK_POINTS]
    if unknown:
        raise ConfigError(
            f"remat {text!r}: nothing is called {unknown[0]!r}; there are {', '.join(MARK_POINTS)}"
        )
    if kind == "save":
        save: Policy = jax.checkpoint_policies.save_only_these_names(*chosen)
        return save
    offload: Policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(chosen),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return offload


def check_can_offload(text: str, platform: str) -> None:
    """Raise `ConfigError` if `text` offloads and the platform's devices have no memory but one."""
    if text.startswith("offload:") and platform == "cpu":
        raise ConfigError(
            f"remat {text!r}: on {platform} devices there is no other memory to offload to; use "
            f"save:{text.removeprefix('offload:')} or run on GPUs or TPUs"
        )


def named_mark(mark: Callable[[str, jax.Array], jax.Array]) -> Callable[[str, Any], jax.Array]:
    """A `mark` that also gives the value its point's name, for policies to find."""
    return lambda name, x: checkpoint_name(mark(name, x), name)
