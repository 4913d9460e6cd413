"""Llama, and what its relatives do differently, as single-device functions that know no mesh.

A family is fields of `LlamaConfig` (biases, norms of queries and keys, windows, latent attention,
experts), and parameters and steps exist where these say so.

Shapes are in the names:

    B batch    S, T sequence (query, key)    H hidden    M inside the MLP    V vocabulary
    N query heads    K key/value heads    G query heads of one key head    D head    E half a head
    L layers    I, O in and out of a projection    R latent, of which keys and values are made

Weights are (O, I). At each point of `marks.MARK_POINTS` a value is passed to `mark`, which returns
it, perhaps with a sharding; `sharding.py` decides which.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.experts import Loads, mixture
from spmd.models.llama.marks import Mark, no_marks
from spmd.models.llama.parameters import DOWN, FP8, GATE_AND_UP, OUTPUT, QUERY_KEY_VALUE, Params
from spmd.models.llama.remat import Policy, checkpoint_policy, named_mark
from spmd.models.llama.rope import apply_rope, halves, rope_angles


def attention_weights(
    q_BSND: jax.Array,
    k_BTND: jax.Array,
    segment_ids_BS: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Causal `softmax(q k / sqrt(D))`, computed in float32.

    Returns:
        Weights (B, N, S, T) in the dtype of `q`. With segments, a token sees only its own segment;
        with a window, itself and the tokens just before it, so many in all.
    """
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", q_BSND, k_BTND, preferred_element_type=jnp.float32)
    scores_BNST *= q_BSND.shape[-1] ** -0.5
    queries_S1, keys_1T = jnp.arange(q_BSND.shape[1])[:, None], jnp.arange(k_BTND.shape[1])[None, :]
    visible_ST = queries_S1 >= keys_1T
    if window is not None:
        visible_ST &= queries_S1 - window < keys_1T
    scores_BNST = jnp.where(visible_ST, scores_BNST, np.finfo(np.float32).min)
    if segment_ids_BS is not None:
        same_BST = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
        scores_BNST = jnp.where(same_BST[:, None], scores_BNST, np.finfo(np.float32).min)
    return jax.nn.softmax(scores_BNST, axis=-1).astype(q_BSND.dtype)


def repeat_heads(x_BTKD: jax.Array, groups: int) -> jax.Array:
    """Repeats each key head `groups` times in a row, once for each query head: (B, T, K * G, D).

    The copies are small next to the weights (B, N, S, T), and the dim of all heads can be split
    over more devices than there are key heads.
    """
    if groups == 1:
        return x_BTKD
    batch, length, heads, width = x_BTKD.shape
    x_BTKGD = jnp.broadcast_to(x_BTKD[:, :, :, None, :], (batch, length, heads, groups, width))
    return x_BTKGD.reshape(batch, length, heads * groups, width)


def forward(
    params: Params,
    tokens_BS: jax.Array,
    config: LlamaConfig,
    mark: Mark = no_marks,
    *,
    segment_ids_BS: jax.Array | None = None,
    positions_BS: jax.Array | None = None,
) -> jax.Array:
    """Logits of the next token at each position, which sees itself and the positions before it.

    Args:
        params: as from `fresh.init`.
        tokens_BS: token ids, integers in `[0, vocab_size)`.
        config: the model; its `zigzag` is for `objective.loss`, and nothing here.
        mark: called at every point of `marks.MARK_POINTS`.
        segment_ids_BS: the document of each token, which sees only tokens of the same one. None
            takes each row for one document.
        positions_BS: the position of each token in its document; None counts from 0 in each row.

    Returns:
        Logits (B, S, V) in the compute dtype.
    """
    config = dataclasses.replace(config, zigzag=1)
    return logits_and_loads(params, tokens_BS, config, mark, segment_ids_BS, positions_BS)[0]


def logits_and_loads(
    params: Params,
    tokens_BS: jax.Array,
    config: LlamaConfig,
    mark: Mark,
    segment_ids_BS: jax.Array | None,
    positions_BS: jax.Array | None,
) -> tuple[jax.Array, Loads | None]:
    """(logits, the mean loads of experts, if any).

    The arguments are those of `forward`. Where `config.zigzag` is more than 1, tokens, segments and
    positions come in that order.
    """
    x_BSH, loads = last_states(params, tokens_BS, config, mark, segment_ids_BS, positions_BS)
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return mark("logits", linear(x_BSH, head["weight"])), loads


def last_states(
    params: Params,
    tokens_BS: jax.Array,
    config: LlamaConfig,
    mark: Mark = no_marks,
    segment_ids_BS: jax.Array | None = None,
    positions_BS: jax.Array | None = None,
) -> "Ran":
    """(what the last layer makes (B, S, H), normalized, and loads), as of `logits_and_loads`."""
    table_VH = params["embed_tokens"]["weight"].astype(config.dtype)
    x_BSH = mark("inputs_embeds", embeddings(table_VH, tokens_BS, config))
    positions = jnp.arange(tokens_BS.shape[1]) if positions_BS is None else positions_BS
    x_BSH, loads = run_layers(params, x_BSH, positions, segment_ids_BS, config, mark)
    return norm(x_BSH, params["norm"], config), loads


def embeddings(table_VH: jax.Array, tokens: jax.Array, config: LlamaConfig) -> jax.Array:
    """The rows (..., H) of a table for tokens (...), scaled if the model does so."""
    x = jnp.take(table_VH, tokens, axis=0, mode="clip")
    return x * jnp.asarray(config.hidden_size**0.5, x.dtype) if config.scale_embeddings else x


def run_layers(
    params: Params,
    x_BSH: jax.Array,
    positions: jax.Array,
    segment_ids_BS: jax.Array | None,
    config: LlamaConfig,
    mark: Mark,
) -> "Ran":
    """Runs all layers: those that are alike and have the same window together."""
    policy = checkpoint_policy(config.remat)
    mark = mark if policy is None else named_mark(mark)
    dense, loads = config.first_k_dense_replace, list[Any]()
    for span, turns in config.spans:
        first = span.start < dense
        layers = (params["dense"] if first else params)["layers"]
        span = span if first else range(span.start - dense, span.stop - dense)
        ropes = {x: rope_angles(positions, config, x) for x in {w is not None for w in turns}}
        differ = next(iter(ropes.values())).ndim == 3  # between sequences
        rows = (ropes if differ else None, segment_ids_BS)

        def run(
            layer: Params,
            x_BSH: jax.Array,
            rows: Rows,
            window: int | None,
            ropes: Angles = ropes,
        ) -> Ran:
            angles, segments = rows
            angle = (angles or ropes)[window is not None]
            return decoder_layer(layer, x_BSH, angle, segments, window, config, mark)

        runs = [functools.partial(run, window=window) for window in turns]
        x_BSH, found = run_span(runs, policy, layers, span, x_BSH, rows, config)
        loads += [] if found is None else [found]
    mean = sum(loads) / (config.num_hidden_layers - dense) if loads else None
    return x_BSH, mean


def decoder_layer(
    layer: Params,
    x_BSH: jax.Array,
    rope: jax.Array,
    segment_ids_BS: jax.Array | None,
    window: int | None,
    config: LlamaConfig,
    mark: Mark,
) -> "Ran":
    """One layer: attention, then the MLP. The input of each is normalized, its output is added."""
    normed_BSH = norm(x_BSH, layer["input_layernorm"], config)
    weights = layer["self_attn"]
    added_BSH = attention(weights, normed_BSH, rope, segment_ids_BS, window, config, mark)
    if config.post_norms:
        added_BSH = norm(added_BSH, layer["post_attention_layernorm"], config)
    x_BSH, loads = x_BSH + added_BSH, None
    before = "pre_feedforward" if config.post_norms else "post_attention"
    normed_BSH = norm(x_BSH, layer[f"{before}_layernorm"], config)
    if "experts" in layer["mlp"]:
        added_BSH, loads = mixture(layer["mlp"], normed_BSH, config, config.hot_experts)
        if config.n_shared_experts:
            added_BSH += mlp(layer["mlp"]["shared_experts"], normed_BSH, config)
        added_BSH = mark("mlp_output", added_BSH)
    else:
        added_BSH = mark("mlp_output", mlp(layer["mlp"], normed_BSH, config))
    if config.post_norms:
        added_BSH = norm(added_BSH, layer["post_feedforward_layernorm"], config)
    return x_BSH + added_BSH, loads


def attention(
    weights: Params,
    x_BSH: jax.Array,
    rope: jax.Array,
    segment_ids_BS: jax.Array | None,
    window: int | None,
    config: LlamaConfig,
    mark: Mark,
) -> jax.Array:
    """Causal self-attention; grouped-query if there are fewer key heads than query heads."""
    if config.kv_lora_rank:
        q_BSND, k_BTKD, v_BTKD = latent_heads(weights, x_BSH, rope, config, mark)
    else:
        q, k, v = map(mark, "qkv", project(x_BSH, weights, QUERY_KEY_VALUE, config))
        q_BSND, k_BTKD = split_heads(q, config.num_attention_heads), split_heads(k, config.kv_heads)
        q_BSND, k_BTKD = normed_heads(weights, q_BSND, k_BTKD, config)
        q_BSND, k_BTKD = (apply_rope(x, rope, config.rope_magnitude) for x in (q_BSND, k_BTKD))
        v_BTKD = split_heads(v, config.kv_heads)
    width, narrow = q_BSND.shape[-1], v_BTKD.shape[-1]
    if config.attention == "einsum":
        # The weights between the two einsums are in memory and can be marked.
        groups = config.num_attention_heads // config.kv_heads
        k_BTND, v_BTND = repeat_heads(k_BTKD, groups), repeat_heads(v_BTKD, groups)
        weights_BNST = attention_weights(q_BSND, k_BTND, segment_ids_BS, window)
        weights_BNST = mark("attention_weights", weights_BNST)
        heads_BSND = jnp.einsum("bnst,btnd->bsnd", weights_BNST, v_BTND)
    else:
        if narrow < width:  # kernels take one width; entries that are 0 stay so
            v_BTKD = jnp.pad(v_BTKD, ((0, 0),) * 3 + ((0, width - narrow),))
        heads_BSND = spmd.ops.attention(
            q_BSND,
            k_BTKD,
            v_BTKD,
            window=window,
            segment_ids=segment_ids_BS,
            sinks_N=weights.get("sinks"),
            zigzag=config.zigzag,
            implementation=cast(Any, config.attention),
        )
        heads_BSND = heads_BSND if narrow == width else heads_BSND[..., :narrow]
    heads_BSI = heads_BSND.reshape(*heads_BSND.shape[:-2], -1)
    (output_BSH,) = project(heads_BSI, weights, OUTPUT, config)
    return mark("attention_output", output_BSH)


def latent_heads(
    weights: Params, x_BSH: jax.Array, rope: jax.Array, config: LlamaConfig, mark: Mark
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys (B, S, N, D) and values (B, S, N, V's part of D) of latent attention."""
    q_BSND, latent_BSR, shared_BS1D = latents(weights, x_BSH, rope, config, mark)
    (kv,) = project(latent_BSR, weights, ("kv_b_proj",), config)
    kv_BSND = split_heads(kv, config.num_attention_heads)
    k_BSND, v_BSND = jnp.split(kv_BSND, [config.qk_nope_head_dim], axis=-1)
    shared_BSND = jnp.broadcast_to(shared_BS1D, (*k_BSND.shape[:-1], shared_BS1D.shape[-1]))
    k_BSND = jnp.concatenate([k_BSND, shared_BSND], axis=-1)
    k_BSND, v_BSND = (
        mark(name, x.reshape(*x.shape[:2], -1)).reshape(x.shape)
        for name, x in (("k", k_BSND), ("v", v_BSND))
    )
    return q_BSND, k_BSND, v_BSND


def latents(
    weights: Params, x_BSH: jax.Array, rope: jax.Array, config: LlamaConfig, mark: Mark = no_marks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries (B, S, N, D); what keys and values are made of (B, S, R); the keys of all heads.

    Queries are scaled as YaRN scales scores. The latter keys, (B, S, 1, a part of D), and as much
    of the queries are rotated.
    """
    first = "q_a_proj" if config.q_lora_rank else "q_proj"
    q, kv = project(x_BSH, weights, (first, "kv_a_proj_with_mqa"), config)
    if config.q_lora_rank:
        (q,) = project(norm(q, weights["q_a_layernorm"], config), weights, ("q_b_proj",), config)
    q_BSND = split_heads(mark("q", q), config.num_attention_heads)
    latent_BSR, shared_BSD = jnp.split(kv, [config.kv_lora_rank], axis=-1)
    latent_BSR = norm(latent_BSR, weights["kv_a_layernorm"], config)
    q_BSND, rotated_BSND = jnp.split(q_BSND, [config.qk_nope_head_dim], axis=-1)
    rotated_BSND, shared_BS1D = (
        apply_rope(halves(x), rope, config.rope_magnitude)
        for x in (rotated_BSND, shared_BSD[..., None, :])
    )
    q_BSND = jnp.concatenate([q_BSND, rotated_BSND], axis=-1)
    if config.rope_scaling is not None and config.rope_scaling.scores != 1:
        q_BSND *= config.rope_scaling.scores
    return q_BSND, latent_BSR, shared_BS1D


def normed_heads(
    weights: Params, q: jax.Array, k: jax.Array, config: LlamaConfig
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys (..., D), each head normalized on its own if the model does so.

    Queries are scaled here if scores are not divided by `sqrt(D)`, as attention itself does.
    """
    if config.qk_norm:
        q, k = norm(q, weights["q_norm"], config), norm(k, weights["k_norm"], config)
    if config.query_pre_attn_scalar not in (None, config.head_width):
        q = q * (config.head_width / config.query_pre_attn_scalar) ** 0.5
    return q, k


def mlp(weights: Params, x_BSH: jax.Array, config: LlamaConfig) -> jax.Array:
    """SwiGLU, or GEGLU: `down(silu(gate(x)) * up(x))`."""
    gate_BSM, up_BSM = project(x_BSH, weights, GATE_AND_UP, config)
    (down_BSH,) = project(activated(gate_BSM, config) * up_BSM, weights, DOWN, config)
    return down_BSH


def activated(gate: jax.Array, config: LlamaConfig) -> jax.Array:
    """The activation of an MLP's gate."""
    return jax.nn.silu(gate) if config.hidden_act == "silu" else jax.nn.gelu(gate, approximate=True)


def project(
    x_BSI: jax.Array, weights: Params, names: Sequence[str], config: LlamaConfig
) -> tuple[jax.Array, ...]:
    """`linear` of one input by each of a block's weights that are named; in fp8 if `config` says.

    Biases are added where there are any. Without a state, as in parameters that were loaded, maxima
    are those of the operands at hand.
    """
    chosen = tuple(weights[name]["weight"] for name in names)
    if config.matmul == "fp8":
        state = weights.get(FP8, {}).get(" ".join(names))
        inner = ((x_BSI.ndim - 1,), (1,)), ((), ())
        found = spmd.ops.fp8_dot(x_BSI, chosen, state, dimension_numbers=inner)
    else:
        found = tuple(linear(x_BSI, weight_OI) for weight_OI in chosen)
    return tuple(
        add_low_rank(add_bias(x, weights[name]), x_BSI, weights[name])
        for x, name in zip(found, names, strict=True)
    )


def add_low_rank(x_BSO: jax.Array, x_BSI: jax.Array, projection: Params) -> jax.Array:
    """The product of a projection's adapters (see `lora.py`) added to its output, if it has any."""
    if "lora_A" not in projection:
        return x_BSO
    return x_BSO + linear(linear(x_BSI, projection["lora_A"]), projection["lora_B"])


def add_bias(x: jax.Array, projection: Params) -> jax.Array:
    """The bias of a projection added to its output (..., O), if it has one."""
    return x + projection["bias"].astype(x.dtype) if "bias" in projection else x


def linear(x_BSI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """`x @ weight.T` in the dtype of `x`."""
    return jnp.einsum("bsi,oi->bso", x_BSI, weight_OI.astype(x_BSI.dtype))


def norm(x_BSH: jax.Array, params: Params, config: LlamaConfig) -> jax.Array:
    """`rms_norm` as a model has it; with an offset, its weight is multiplied in float32, too."""
    weight_H, x = params["weight"], x_BSH
    if config.norm_offset:
        weight_H, x = weight_H.astype(jnp.float32) + config.norm_offset, x.astype(jnp.float32)
    return rms_norm(x, weight_H, config.rms_norm_eps).astype(x_BSH.dtype)


def rms_norm(x_BSH: jax.Array, weight_H: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * weight`, normalized in float32."""
    x32_BSH = x_BSH.astype(jnp.float32)
    mean_square_BS1 = jnp.mean(jnp.square(x32_BSH), axis=-1, keepdims=True)
    normed_BSH = x32_BSH * jax.lax.rsqrt(mean_square_BS1 + eps)
    return normed_BSH.astype(x_BSH.dtype) * weight_H.astype(x_BSH.dtype)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """(B, S, heads * D) -> (B, S, heads, D)."""
    return x.reshape(*x.shape[:-1], heads, -1)


Angles = Mapping[bool, jax.Array]
"""Whether a layer has a window -> the angles that it rotates by, (S, E) or (B, S, E)."""

Rows = tuple[Angles | None, jax.Array | None]
"""What differs between sequences: their angles and segment ids (B, S), if they do."""

Ran = tuple[jax.Array, Loads | None]
"""What layers return: the stream behind them, and the sum of their experts' loads."""

Run = Callable[[Params, jax.Array, Rows], Ran]
"""Called with a layer, the stream before it, and what differs between sequences."""


def run_span(
    runs: Sequence[Run],
    policy: Policy | None,
    layers: Params,
    span: range,
    x_BSH: jax.Array,
    rows: Rows,
    config: LlamaConfig,
) -> Ran:
    """Runs some layers, one after the other.

    Args:
        runs: run one layer each, in turns.
        policy: what is kept of a layer that is recomputed; None recomputes nothing.
        layers: the parameters of all layers, stacked or apart.
        span: the indices of those that are run.
        x_BSH: the stream before them.
        rows: handed to `run`.
    """
    # XLA must not merge the recomputation with the first computation (CSE), or everything stays in
    # memory after all. In a scan it cannot: forward and backward are different loops.
    lean = [jax.checkpoint(r, policy=policy, prevent_cse=not config.scan_layers) for r in runs]
    every = config.remat_every if policy is not None else 1
    group = math.lcm(len(runs), every)

    def run_some(some: Sequence[Params], x_BSH: jax.Array, rows: Rows) -> Ran:
        loads = []
        for index, layer in enumerate(some, start=1):
            recomputed = policy is not None and index % every == 0
            run = (lean if recomputed else runs)[(index - 1) % len(runs)]
            x_BSH, found = run(layer, x_BSH, rows)
            loads.append(found)
        return x_BSH, jax.tree.map(lambda *each: sum(each), *loads)

    def run_group(x_BSH: jax.Array, stacked: Params, rows: Rows = rows) -> Ran:
        return run_some(_apart(stacked, group), x_BSH, rows)

    if not config.scan_layers:
        return run_some([layers[str(index)] for index in span], x_BSH, rows)
    groups = _grouped(layers, span, group)
    if config.stages > 1:
        has_loads = "experts" in groups["mlp"]
        # Each row goes through the stages with the sum of its microbatch's loads.
        sums = [jnp.zeros((x_BSH.shape[0], 2, config.num_experts))] if has_loads else []

        def run_stage(stacked: Params, state: Any, rows: Rows) -> Any:
            x_BSH, *sums = state
            x_BSH, found = run_group(x_BSH, stacked, rows)
            return x_BSH, *(total + found for total in sums)

        x_BSH, *sums = spmd.pipeline(
            run_stage,
            groups,
            (x_BSH, *sums),
            rows,
            stages=config.stages,
            microbatches=config.stage_microbatches,
            schedule=None if config.stage_schedule == "auto" else config.stage_schedule,
        )
        return x_BSH, jnp.mean(sums[0], axis=0) if has_loads else None
    x_BSH, loads = jax.lax.scan(run_group, x_BSH, groups)
    return x_BSH, jax.tree.map(functools.partial(jnp.sum, axis=0), loads)


def _grouped(layers: Params, span: range, group: int) -> Params:
    """The layers of a span, (L, ...), in groups of so many: (L / group, group, ...)."""
    if len(span) < len(jax.tree.leaves(layers)[0]):
        layers = jax.tree.map(lambda x: x[span.start : span.stop], layers)
    if group == 1:
        return layers
    count = len(span) // group
    grouped: Params = jax.tree.map(lambda x: x.reshape(count, group, *x.shape[1:]), layers)
    return grouped


def _apart(stacked: Params, group: int) -> list[Params]:
    """The layers of one group of `_grouped`."""
    if group == 1:
        return [stacked]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(group)]
