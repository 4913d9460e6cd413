"""Prefill and decode: what one call computes, as functions of (weights, state, inputs).

Prefill runs a chunk of one slot's prompt. Decode generates the next tokens of all slots:

    prefill(tokens 0..7)            slot 2 holds 8 tokens
    prefill(tokens 8..11, last)     slot 2 holds 12 tokens; the first new token is drawn
    decode(steps=3)                 slot 2 holds 15 tokens; three more are drawn

All shapes are fixed, and nothing here knows of a mesh. The state is donated, so XLA updates it in
place. Shapes are in the names, as in `models.llama.model`, and

    B slots    S tokens of a chunk    T cache positions that attention reads    P alternatives
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from models import sampling
from models.llama.config import LlamaConfig
from models.llama.decode.cache import State, attend_chunk, write_chunk, write_each
from models.llama.decode.layers import Weights, logits, run_layers


def decode(
    weights: Weights,
    state: State,
    control: Mapping[str, Any],
    *,
    length: int,
    steps: int,
    alternatives: int,
    config: LlamaConfig,
) -> tuple[State, sampling.Report]:
    """Generates several tokens for every active slot, in a loop on the device.

    Args:
        weights: see `Weights`.
        state: as `state_leaves` says.
        control: `active` (B,), which slots take part; `steps`, how many tokens to generate;
            `alternatives`, whether to report the likeliest tokens.
        length: T; no active slot may grow beyond it.
        steps: the largest value that `control["steps"]` may have.
        alternatives: P.
        config: the model.

    Returns:
        (state, report with leading dims (steps, B)). Rows from `control["steps"]` on are zero.
    """
    active_B = control["active"]

    def body(carry: Any) -> Any:
        i, state, reports = carry
        logits_BV, state = _next_logits(weights, state, active_B, length, config)
        params = sampling.SamplingParams(**state["sampling"])
        # The position of the new token goes into the random key, so a request draws the same
        # tokens whichever slot it is in and however its steps are divided among calls.
        ids_B = sampling.sample(
            logits_BV, params, state["seen"], state["drawn"], state["lengths"] + 1
        )
        made = sampling.report(logits_BV, ids_B, alternatives, control["alternatives"])
        reports = jax.tree.map(lambda all_, one: all_.at[i].set(one), reports, made)
        return i + 1, _advance(state, ids_B, active_B), reports

    shape = (steps, active_B.shape[0])
    nothing = sampling.Report(
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, alternatives), jnp.int32),
        jnp.zeros((*shape, alternatives), jnp.float32),
    )
    _, state, reports = jax.lax.while_loop(
        lambda carry: carry[0] < control["steps"], body, (jnp.int32(0), state, nothing)
    )
    return state, reports


def _next_logits(
    weights: Weights, state: State, active_B: Any, length: int, config: LlamaConfig
) -> tuple[Any, State]:
    """Runs each slot's latest token: logits (B, V) of the next one, and the state with its key.

    `tokens` and `lengths` stay as they are. Logits of slots that are not active mean nothing.
    """
    positions_B = state["lengths"]
    # An inactive slot may be in the middle of its prefill: nothing may be written into it. Its
    # attention reads position 0 only, to cost little.
    written_B = jnp.where(active_B, positions_B, -1)
    seen_B = jnp.where(active_B, positions_B, 0)

    def attend(q_BKGD: Any, kv_B2KD: Any, layer: State) -> tuple[Any, State]:
        layer = write_each(layer, kv_B2KD, written_B)
        heads_BKGD = spmd.ops.decode_attention(
            q_BKGD, layer["values"], seen_B, length=length, scales=layer.get("scales")
        )
        return heads_BKGD, layer

    x_BH, cache = run_layers(weights, state["tokens"], positions_B, state["cache"], attend, config)
    return logits(weights, x_BH, config), {**state, "cache": cache}


def _advance(state: State, ids_B: Any, active_B: Any) -> State:
    """Makes the drawn tokens the latest ones of the active slots."""
    # A comparison instead of a scatter: it stays local where V is split over devices.
    is_id_BV = ids_B[:, None] == jnp.arange(state["seen"].shape[1])
    is_new_BV = is_id_BV & active_B[:, None]
    return {
        **state,
        "tokens": jnp.where(active_B, ids_B, state["tokens"]),
        "lengths": jnp.where(active_B, state["lengths"] + 1, state["lengths"]),
        "seen": state["seen"] | is_new_BV,
        "drawn": state["drawn"] + is_new_BV,
    }


def prefill(
    weights: Weights,
    state: State,
    chunk: Mapping[str, Any],
    *,
    length: int,
    alternatives: int,
    scores: bool,
    config: LlamaConfig,
) -> tuple[State, Any]:
    """Runs a chunk of one slot's prompt, and draws the token behind it.

    Args:
        weights: see `Weights`.
        state: as `state_leaves` says.
        chunk: the inputs.

            - `tokens` (S,): the chunk's ids, padded behind the first `count`.
            - `count`: how many of them are real.
            - `slot`: where they go.
            - `start`: the position of the first one; `start` + S may not exceed the slot.
            - `last`: whether the prompt ends with this chunk. Only then do the drawn token and
              the two entries below become part of the state.
            - `sampling/FIELD`: scalars, the request's sampling parameters.
            - `seen` (V,): which tokens occur in the whole prompt.
            - `targets` (S,), with `scores` only: the prompt's token after each one.
        length: T; the chunk has to end within.
        alternatives: P.
        scores: whether to report the log-probabilities of `targets` as well.
        config: the model.

    Returns:
        (state, {"first": report (1, ...)}), with `scores` also {"scores": report (S, ...)}.
    """
    slot, start = chunk["slot"], chunk["start"]
    x_SH, state = _run_chunk(weights, state, chunk, length, config)
    last = chunk["count"] - 1
    x_1H = jax.lax.dynamic_slice_in_dim(x_SH, last, 1)
    logits_1V = logits(weights, x_1H, config)
    params = {name: chunk["sampling"][name] for name in sampling.FIELDS}
    one = sampling.SamplingParams(**{name: x[None] for name, x in params.items()})
    end = start + chunk["count"]
    seen_1V = chunk["seen"][None]
    ids_1 = sampling.sample(logits_1V, one, seen_1V, jnp.zeros(seen_1V.shape, jnp.int32), end[None])
    outputs = {"first": sampling.report(logits_1V, ids_1, alternatives)}
    if scores:
        outputs["scores"] = sampling.report(
            logits(weights, x_SH, config), chunk["targets"], alternatives
        )
    state = {**state, "lengths": state["lengths"].at[slot].set(end)}
    return _begin(state, chunk, params, ids_1[0]), outputs


def chunk_logits(
    weights: Weights, state: State, chunk: Mapping[str, Any], *, length: int, config: LlamaConfig
) -> tuple[Any, State]:
    """Runs a chunk of one slot's prompt: logits (S, V) behind each of its tokens, and the state.

    Args:
        weights: see `Weights`.
        state: as `state_leaves` says.
        chunk: `tokens` (S,), `slot` and `start`, as for `prefill`.
        length: T; the chunk has to end within.
        config: the model.
    """
    x_SH, state = _run_chunk(weights, state, chunk, length, config)
    return logits(weights, x_SH, config), state


def _run_chunk(
    weights: Weights, state: State, chunk: Mapping[str, Any], length: int, config: LlamaConfig
) -> tuple[Any, State]:
    """Hidden states (S, H) behind the last layer, and the state with the chunk's keys in it."""
    slot, start = chunk["slot"], chunk["start"]
    positions_S = start + jnp.arange(chunk["tokens"].shape[0])

    def attend(q_SKGD: Any, kv_S2KD: Any, layer: State) -> tuple[Any, State]:
        # Padding is written too. It lies behind the real tokens, where the causal mask hides it
        # until the next chunk or decode overwrites it.
        layer = write_chunk(layer, kv_S2KD, slot, start)
        return attend_chunk(q_SKGD, layer, slot, positions_S, length), layer

    x_SH, cache = run_layers(weights, chunk["tokens"], positions_S, state["cache"], attend, config)
    return x_SH, {**state, "cache": cache}


def _begin(state: State, chunk: Mapping[str, Any], params: Mapping[str, Any], first: Any) -> State:
    """Sets a slot up for decode if its prompt ends with this chunk; else changes nothing."""
    slot, last = chunk["slot"], chunk["last"]
    seen_V = chunk["seen"].at[first].set(True)
    drawn_V = jnp.zeros(seen_V.shape, jnp.int32).at[first].set(1)

    def put(array: Any, value: Any) -> Any:
        return array.at[slot].set(jnp.where(last, value, array[slot]))

    return {
        **state,
        "tokens": put(state["tokens"], first),
        "seen": put(state["seen"], seen_V),
        "drawn": put(state["drawn"], drawn_V),
        "sampling": {name: put(state["sampling"][name], x) for name, x in params.items()},
    }
