"""Llama, and what its relatives do differently, as single-device functions that know no mesh.

A family is fields of `LlamaConfig` (biases, norms of queries and keys, windows, experts), and
parameters and steps exist where these say so.

Shapes are in the names:

    B batch    S, T sequence (query, key)    H hidden    M inside the MLP    V vocabulary
    N query heads    K key/value heads    G query heads of one key head    D head    E half a head
    L layers    I, O in and out of a projection

Weights are (O, I). At each point of `MARK_POINTS` a value is passed to `mark`, which returns it,
perhaps with a sharding; `sharding.py` decides which.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from models.llama.config import LlamaConfig
from models.llama.experts import Loads, balance, mixture
from models.llama.remat import Policy, checkpoint_policy, named_mark
from models.llama.rope import rope_frequencies

Params = dict[str, Any]
"""Nested dicts of arrays, under Hugging Face's names."""

Mark = Callable[[str, jax.Array], jax.Array]
"""Called with a name of `MARK_POINTS` and the value there; returns the value."""

Rows = tuple[jax.Array | None, jax.Array | None]
"""What differs between sequences: their angles (B, S, E) and segment ids (B, S), if they do."""

Ran = tuple[jax.Array, Loads | None]
"""What layers return: the stream behind them, and the sum of their experts' loads."""

MARK_POINTS: Mapping[str, str] = {
    "inputs_embeds": "BSH",
    "q": "BS(ND)",
    "k": "BS(KD)",
    "v": "BS(KD)",
    "attention_weights": "BNST",
    "attention_output": "BSH",
    "mlp_output": "BSH",
    "logits": "BSV",
}
"""The points at which `mark` is called, with the dims of the value there.

`attention_weights` exists only with `attention="einsum"`."""


LAYERS = "layers/"

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Projections of a layer, those together that read one input."""

FP8 = "fp8"
"""Beside the projections of a block: the states of their 8-bit products, by the names of each."""


def no_marks(name: str, x: jax.Array) -> jax.Array:
    """A `mark` that marks nothing."""
    del name
    return x


# Parameters


def init(key: jax.Array, config: LlamaConfig) -> Params:
    """Draws fresh parameters.

    They are normal with standard deviation `initializer_range`. Projections into the residual
    stream are divided by `sqrt(2 * layers)`, so that its variance does not grow with depth. Norms
    are 1, biases 0.

    Args:
        key: a `jax.random.key`.
        config: the model.

    Returns:
        Nested dicts. With `scan_layers` the leaves under `layers` have a leading dim L. Without it
        `layers` has a dict for each layer, with the keys `"0"`, `"1"`, ... Both have the same
        numbers.
    """
    outer_key, keys_L = init_keys(key, config)
    params = init_outer(outer_key, config)
    if config.scan_layers:
        # One layer after the other: making all at once would need their memory several times.
        params["layers"] = jax.lax.map(functools.partial(init_layer, config=config), keys_L)
        return params
    params["layers"] = {
        str(index): init_layer(keys_L[index], config) for index in range(config.num_hidden_layers)
    }
    return params


def init_keys(key: jax.Array, config: LlamaConfig) -> tuple[jax.Array, jax.Array]:
    """(the key for `init_outer`, the keys (L,) for `init_layer`) with which `init` calls them."""
    outer_key, layers_key = jax.random.split(key)
    return outer_key, jax.random.split(layers_key, config.num_hidden_layers)


def init_outer(key: jax.Array, config: LlamaConfig) -> Params:
    """Draws fresh parameters of everything but the layers."""
    shapes = config.parameter_shapes()
    outer = {path: shape for path, shape in shapes.items() if not path.startswith(LAYERS)}
    return _init_leaves(key, outer, config)


def init_layer(key: jax.Array, config: LlamaConfig) -> Params:
    """Draws fresh parameters of one layer."""
    shapes = config.parameter_shapes()
    inner = {p.removeprefix(LAYERS): s for p, s in shapes.items() if p.startswith(LAYERS)}
    return _layer_with_states(_init_leaves(key, inner, config), config)


def with_states(params: Params, config: LlamaConfig) -> Params:
    """The parameters with states of their 8-bit products; fresh ones where they have none."""
    layers, add = params["layers"], functools.partial(_layer_with_states, config=config)
    if config.scan_layers:
        return {**params, "layers": jax.vmap(add)(layers)}
    return {**params, "layers": {index: add(layer) for index, layer in layers.items()}}


def _layer_with_states(layer: Params, config: LlamaConfig) -> Params:
    if config.matmul != "fp8":
        return layer
    return layer | {block: _block_with_states(layer[block]) for block in ("self_attn", "mlp")}


def _block_with_states(weights: Params) -> Params:
    fresh = {
        " ".join(names): spmd.ops.fp8_state(tuple(weights[name]["weight"] for name in names))
        for names in TOGETHER
        if names[0] in weights
    }
    return {FP8: fresh} | weights


def without_states(params: Params) -> Params:
    """The parameters without states, as they are loaded and exported."""
    return {
        name: without_states(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if name != FP8
    }


def _init_leaves(
    key: jax.Array, shapes: Mapping[str, tuple[int, ...]], config: LlamaConfig
) -> Params:
    params: Params = {}
    for path, leaf_key in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        _insert(params, path, _init_leaf(leaf_key, path, shapes[path], config))
    return params


def _init_leaf(key: jax.Array, path: str, shape: tuple[int, ...], config: LlamaConfig) -> jax.Array:
    if path.endswith("norm/weight"):
        return jnp.ones(shape, config.param_dtype)
    if path.endswith("/bias"):
        return jnp.zeros(shape, config.param_dtype)
    into_residual = path.endswith(("o_proj/weight", "down_proj/weight"))
    scale = (2 * config.num_hidden_layers) ** -0.5 if into_residual else 1.0
    return (scale * config.initializer_range * jax.random.normal(key, shape)).astype(
        config.param_dtype
    )


def _insert(params: Params, path: str, leaf: jax.Array) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        params = params.setdefault(parent, {})
    params[last] = leaf


def unstack_layers(params: Params) -> Params:
    """Parameters with a leading dim L -> parameters with a dict for each layer."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = {
        str(index): jax.tree.map(lambda leaf, i=index: leaf[i], params["layers"])
        for index in range(count)
    }
    return {**params, "layers": layers}


# Forward


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
        params: as from `init`.
        tokens_BS: token ids, integers in `[0, vocab_size)`.
        config: the model.
        mark: called at every point of `MARK_POINTS`.
        segment_ids_BS: the document of each token, which sees only tokens of the same one. None
            takes each row for one document.
        positions_BS: the position of each token in its document; None counts from 0 in each row.

    Returns:
        Logits (B, S, V) in the compute dtype.
    """
    config = dataclasses.replace(config, zigzag=1)  # an order that only `loss` may choose
    return _forward(params, tokens_BS, config, mark, segment_ids_BS, positions_BS)[0]


def _forward(
    params: Params,
    tokens_BS: jax.Array,
    config: LlamaConfig,
    mark: Mark,
    segment_ids_BS: jax.Array | None,
    positions_BS: jax.Array | None,
) -> tuple[jax.Array, Loads | None]:
    """(logits, the mean loads of experts, if any), of tokens in the order that `config` says."""
    table_VH = params["embed_tokens"]["weight"].astype(config.dtype)
    x_BSH = mark("inputs_embeds", jnp.take(table_VH, tokens_BS, axis=0, mode="clip"))
    positions = positions_BS
    if positions is None:
        positions = _in_order(jnp.arange(tokens_BS.shape[1]), config)
    rope = rope_angles(positions, config)
    x_BSH, loads = _run_layers(params["layers"], x_BSH, rope, segment_ids_BS, config, mark)
    x_BSH = rms_norm(x_BSH, params["norm"]["weight"], config.rms_norm_eps)
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return mark("logits", linear(x_BSH, head["weight"])), loads


def loss(
    params: Params,
    inputs_BS: jax.Array,
    targets_BS: jax.Array,
    config: LlamaConfig,
    mark: Mark = no_marks,
    z_loss: float = 0.0,
    *,
    segment_ids_BS: jax.Array | None = None,
    positions_BS: jax.Array | None = None,
    weights_BS: jax.Array | None = None,
) -> jax.Array:
    """Mean cross-entropy of the next token at each position, in nats and float32.

    With experts, `router_aux_loss_coef` times their load-balancing loss is added.

    Args:
        params: as from `init`.
        inputs_BS: token ids.
        targets_BS: the token after each of them.
        config: the model.
        mark: as for `forward`.
        z_loss: as for `cross_entropy`.
        segment_ids_BS: as for `forward`.
        positions_BS: as for `forward`.
        weights_BS: the weight of each target in the mean; None weighs all the same.
    """
    # A mean over positions does not depend on their order.
    inputs_BS, targets_BS, segment_ids_BS, positions_BS, weights_BS = (
        _in_order(x, config)
        for x in (inputs_BS, targets_BS, segment_ids_BS, positions_BS, weights_BS)
    )
    logits_BSV, loads = _forward(params, inputs_BS, config, mark, segment_ids_BS, positions_BS)
    loss = cross_entropy(logits_BSV, targets_BS, weights_BS, z_loss=z_loss)
    if loads is not None and config.router_aux_loss_coef:
        loss += config.router_aux_loss_coef * balance(loads)
    return loss


def _in_order(x_S: Any, config: LlamaConfig) -> Any:
    """What has a last dim of positions, in the order that `config` says."""
    if x_S is None or config.zigzag == 1:
        return x_S
    return spmd.ops.zigzag(x_S, config.zigzag, dim=-1)


def cross_entropy(
    logits_BSV: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array | None = None,
    *,
    z_loss: float = 0.0,
) -> jax.Array:
    """Mean of `-log softmax(logits)[target]`, in float32.

    Args:
        logits_BSV: logits.
        targets_BS: token ids.
        weights_BS: the weight of each target in the mean; None weighs all the same. If all weights
            are 0, so is the result.
        z_loss: times the square of the softmax's log-normalizer is added at each position
            (Chowdhery et al. 2022, section 5). It keeps logits from drifting.
    """
    logits_BSV = logits_BSV.astype(jnp.float32)
    # A masked sum, not a gather: it needs no communication of logits when V is split.
    is_target_BSV = targets_BS[..., None] == jnp.arange(logits_BSV.shape[-1])
    target_BS = jnp.sum(jnp.where(is_target_BSV, logits_BSV, 0.0), axis=-1)
    normalizer_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    loss_BS = normalizer_BS - target_BS
    if z_loss:
        loss_BS += z_loss * jnp.square(normalizer_BS)
    return jnp.mean(loss_BS) if weights_BS is None else weighted_mean(loss_BS, weights_BS)


def weighted_mean(x_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
    """`sum(weights * x) / sum(weights)`; 0 if all weights are 0."""
    total = jnp.sum(weights_BS)
    return jnp.sum(weights_BS * x_BS) / jnp.where(total > 0, total, 1.0)


def _run_layers(
    layers: Params,
    x_BSH: jax.Array,
    rope: jax.Array,
    segment_ids_BS: jax.Array | None,
    config: LlamaConfig,
    mark: Mark,
) -> tuple[jax.Array, Loads | None]:
    policy = checkpoint_policy(config.remat, MARK_POINTS)
    mark = mark if policy is None else named_mark(mark)
    loads = []
    rows = (rope if rope.ndim == 3 else None, segment_ids_BS)  # what differs between sequences
    for span, window in config.window_spans:

        def run(layer: Params, x_BSH: jax.Array, rows: Rows, window: int | None = window) -> Ran:
            angles, segments = rows
            angles = rope if angles is None else angles
            return decoder_layer(layer, x_BSH, angles, segments, window, config, mark)

        x_BSH, found = _run_span(run, policy, layers, span, x_BSH, rows, config)
        loads.append(found)
    mean = jax.tree.map(lambda *sums: sum(sums) / config.num_hidden_layers, *loads)
    return x_BSH, mean


def _run_span(
    run: Callable[[Params, jax.Array, Rows], Ran],
    policy: Policy | None,
    layers: Params,
    span: range,
    x_BSH: jax.Array,
    rows: Rows,
    config: LlamaConfig,
) -> Ran:
    """Runs layers that differ in nothing but their parameters."""

    def run_some(some: Sequence[Params], x_BSH: jax.Array, rows: Rows = rows) -> Ran:
        loads = []
        for index, layer in enumerate(some, start=1):
            recomputed = policy is not None and index % config.remat_every == 0
            x_BSH, found = (lean if recomputed else run)(layer, x_BSH, rows)
            loads.append(found)
        return x_BSH, jax.tree.map(lambda *each: sum(each), *loads)

    # XLA must not merge the recomputation with the first computation (CSE), or everything stays in
    # memory after all. In a scan it cannot: forward and backward are different loops.
    lean = jax.checkpoint(run, policy=policy, prevent_cse=not config.scan_layers)
    if not config.scan_layers:
        return run_some([layers[str(index)] for index in span], x_BSH)
    count, group = len(span), config.remat_every if policy is not None else 1
    if count < config.num_hidden_layers:
        layers = jax.tree.map(lambda x: x[span.start : span.stop], layers)

    def body(x_BSH: jax.Array, some: Params, rows: Rows = rows) -> Ran:
        if group == 1:
            return run_some([some], x_BSH, rows)
        apart = [jax.tree.map(lambda x, i=i: x[i], some) for i in range(group)]
        return run_some(apart, x_BSH, rows)

    if group > 1:  # (L, ...) -> (L / group, group, ...)
        layers = jax.tree.map(lambda x: x.reshape(count // group, group, *x.shape[1:]), layers)
    if config.stages > 1:
        schedule = None if config.stage_schedule == "auto" else config.stage_schedule
        return spmd.pipeline(
            lambda some, x_BSH, rows: body(x_BSH, some, rows)[0],
            layers,
            x_BSH,
            rows,
            stages=config.stages,
            microbatches=config.stage_microbatches,
            schedule=schedule,
        ), None
    x_BSH, loads = jax.lax.scan(body, x_BSH, layers)
    return x_BSH, jax.tree.map(functools.partial(jnp.sum, axis=0), loads)


def decoder_layer(
    layer: Params,
    x_BSH: jax.Array,
    rope: jax.Array,
    segment_ids_BS: jax.Array | None,
    window: int | None,
    config: LlamaConfig,
    mark: Mark,
) -> Ran:
    """One layer: attention, then the MLP. The input of each is normalized, its output is added."""
    eps = config.rms_norm_eps
    normed_BSH = rms_norm(x_BSH, layer["input_layernorm"]["weight"], eps)
    weights = layer["self_attn"]
    x_BSH = x_BSH + attention(weights, normed_BSH, rope, segment_ids_BS, window, config, mark)
    normed_BSH = rms_norm(x_BSH, layer["post_attention_layernorm"]["weight"], eps)
    if not config.num_experts:
        return x_BSH + mlp(layer["mlp"], normed_BSH, config, mark), None
    added_BSH, loads = mixture(layer["mlp"], normed_BSH, config)
    return x_BSH + mark("mlp_output", added_BSH), loads


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
    projected = project(x_BSH, weights, TOGETHER[0], config)
    q, k, v = map(mark, "qkv", projected)
    q_BSND, k_BTKD = normed_heads(
        weights, split_heads(q, config.num_attention_heads), split_heads(k, config.kv_heads), config
    )
    q_BSND, k_BTKD = apply_rope(q_BSND, rope), apply_rope(k_BTKD, rope)
    v_BTKD = split_heads(v, config.kv_heads)
    if config.attention == "einsum":
        heads_BSND = einsum_attention(q_BSND, k_BTKD, v_BTKD, mark, segment_ids_BS, window)
    else:
        heads_BSND = spmd.ops.attention(
            q_BSND,
            k_BTKD,
            v_BTKD,
            window=window,
            segment_ids=segment_ids_BS,
            zigzag=config.zigzag,
            implementation=cast(Any, config.attention),
        )
    (output_BSH,) = project(merge_heads(heads_BSND), weights, TOGETHER[1], config)
    return mark("attention_output", output_BSH)


def normed_heads(
    weights: Params, q: jax.Array, k: jax.Array, config: LlamaConfig
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys (..., D), each head normalized on its own if the model does so."""
    if not config.qk_norm:
        return q, k
    eps = config.rms_norm_eps
    return (
        rms_norm(q, weights["q_norm"]["weight"], eps),
        rms_norm(k, weights["k_norm"]["weight"], eps),
    )


def einsum_attention(
    q_BSND: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    mark: Mark,
    segment_ids_BS: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Causal attention by two einsums. The weights between them are in memory and can be marked."""
    groups = q_BSND.shape[2] // k_BTKD.shape[2]
    k_BTND, v_BTND = repeat_heads(k_BTKD, groups), repeat_heads(v_BTKD, groups)
    weights_BNST = attention_weights(q_BSND, k_BTND, segment_ids_BS, window)
    weights_BNST = mark("attention_weights", weights_BNST)
    return jnp.einsum("bnst,btnd->bsnd", weights_BNST, v_BTND)


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


def mlp(weights: Params, x_BSH: jax.Array, config: LlamaConfig, mark: Mark) -> jax.Array:
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""
    gate_BSM, up_BSM = project(x_BSH, weights, TOGETHER[2], config)
    (down_BSH,) = project(jax.nn.silu(gate_BSM) * up_BSM, weights, TOGETHER[3], config)
    return mark("mlp_output", down_BSH)


# Pieces


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
    return tuple(add_bias(x, weights[name]) for x, name in zip(found, names, strict=True))


def add_bias(x: jax.Array, projection: Params) -> jax.Array:
    """The bias of a projection added to its output (..., O), if it has one."""
    return x + projection["bias"].astype(x.dtype) if "bias" in projection else x


def linear(x_BSI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """`x @ weight.T` in the dtype of `x`."""
    return jnp.einsum("bsi,oi->bso", x_BSI, weight_OI.astype(x_BSI.dtype))


def rms_norm(x_BSH: jax.Array, weight_H: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * weight`, normalized in float32."""
    x32_BSH = x_BSH.astype(jnp.float32)
    mean_square_BS1 = jnp.mean(jnp.square(x32_BSH), axis=-1, keepdims=True)
    normed_BSH = x32_BSH * jax.lax.rsqrt(mean_square_BS1 + eps)
    return normed_BSH.astype(x_BSH.dtype) * weight_H.astype(x_BSH.dtype)


def rope_angles(positions: jax.Array, config: LlamaConfig) -> jax.Array:
    """The angle by which each frequency turns at each position, in radians and float32.

    Args:
        positions: (S,), or (B, S) if rows differ.
        config: the model.

    Returns:
        Angles (S, E) or (B, S, E).
    """
    return positions.astype(jnp.float32)[..., None] * rope_frequencies(config)


def apply_rope(x_BSND: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding (Su et al. 2021), which rotates a head's first half against its second half.

    Hugging Face's weights are laid out for that; the paper pairs neighbouring entries instead.

    Args:
        x_BSND: heads.
        angles: (S, E) or (B, S, E).
    """
    cos_S1E, sin_S1E = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first_BSNE, second_BSNE = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    rotated = (
        first_BSNE * cos_S1E - second_BSNE * sin_S1E,
        second_BSNE * cos_S1E + first_BSNE * sin_S1E,
    )
    return jnp.concatenate(rotated, axis=-1).astype(x_BSND.dtype)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """(B, S, heads * D) -> (B, S, heads, D)."""
    return x.reshape(*x.shape[:-1], heads, -1)


def merge_heads(x_BSND: jax.Array) -> jax.Array:
    """(B, S, N, D) -> (B, S, N * D)."""
    return x_BSND.reshape(*x_BSND.shape[:-2], -1)


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
