import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.llama import model
from models.llama.config import CONFIGS
from tests.models.llama.inverse import stack_layers

TINY = CONFIGS["tiny"]
UNROLLED = dataclasses.replace(TINY, scan_layers=False)
TOKENS_BS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 8)).astype(np.int32)


@functools.cache
def compiled_forward(config):
    return jax.jit(functools.partial(model.forward, config=config))


def paths_and_shapes(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}


# Parameters


def test_scanned_parameters_have_the_configs_shapes(tiny_params):
    expected = {
        path: (TINY.num_hidden_layers, *shape) if path.startswith("layers/") else shape
        for path, shape in TINY.parameter_shapes().items()
    }
    assert paths_and_shapes(tiny_params) == expected


@pytest.mark.parametrize("config", [TINY, UNROLLED])
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_that_of_the_parameters(config, tied):
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    structs = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structs))
    assert total == config.parameter_count()


def test_scanned_and_unrolled_parameters_are_the_same_numbers(tiny_params):
    unrolled = jax.jit(functools.partial(model.init, config=UNROLLED))(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, stack_layers(unrolled), tiny_params)
    jax.tree.map(np.testing.assert_array_equal, model.unstack_layers(tiny_params), unrolled)


def test_parameter_dtype():
    config = dataclasses.replace(TINY, param_dtype="bfloat16")
    structs = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(structs)} == {jnp.dtype("bfloat16")}


# Forward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_shape_and_dtype(dtype, tiny_params):
    config = dataclasses.replace(TINY, dtype=dtype)
    logits = jax.eval_shape(functools.partial(model.forward, config=config), tiny_params, TOKENS_BS)
    assert logits.shape == (2, 8, TINY.vocab_size)
    assert logits.dtype == jnp.dtype(dtype)


def test_scan_equals_unrolled(tiny_params):
    scanned = compiled_forward(TINY)(tiny_params, TOKENS_BS)
    unrolled = compiled_forward(UNROLLED)(model.unstack_layers(tiny_params), TOKENS_BS)
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-6)


def test_gradients_of_scan_equal_those_of_unrolled(tiny_params):
    def gradients(params, config):
        targets_BS = np.roll(TOKENS_BS, -1, axis=1)
        loss = functools.partial(model.loss, config=config)
        return jax.jit(jax.grad(loss))(params, TOKENS_BS, targets_BS)

    scanned = gradients(tiny_params, TINY)
    unrolled = stack_layers(gradients(model.unstack_layers(tiny_params), UNROLLED))
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(assert_close, scanned, unrolled)


def test_no_position_sees_a_later_one(tiny_params):
    changed_BS = TOKENS_BS.copy()
    changed_BS[:, 5] = (changed_BS[:, 5] + 1) % TINY.vocab_size
    before = compiled_forward(TINY)(tiny_params, TOKENS_BS)
    after = compiled_forward(TINY)(tiny_params, changed_BS)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.any(before[:, 5:] != after[:, 5:], axis=-1))


def test_grouped_queries_equal_repeated_key_heads(tiny_params):
    groups = TINY.num_attention_heads // TINY.kv_heads
    full_config = dataclasses.replace(TINY, num_key_value_heads=None)

    def repeat(path, leaf):
        if not any(name in jax.tree_util.keystr(path) for name in ("k_proj", "v_proj")):
            return leaf
        heads = leaf.reshape(leaf.shape[0], TINY.kv_heads, TINY.head_width, leaf.shape[-1])
        return np.repeat(heads, groups, axis=1).reshape(leaf.shape[0], -1, leaf.shape[-1])

    full_params = jax.tree_util.tree_map_with_path(repeat, tiny_params)
    grouped = compiled_forward(TINY)(tiny_params, TOKENS_BS)
    full = compiled_forward(full_config)(full_params, TOKENS_BS)
    np.testing.assert_allclose(grouped, full, rtol=1e-5, atol=1e-6)


def test_tied_output_uses_the_embedding(tiny_params):
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    tied = {name: leaf for name, leaf in tiny_params.items() if name != "lm_head"}
    untied = {**tied, "lm_head": tied["embed_tokens"]}
    np.testing.assert_array_equal(
        compiled_forward(config)(tied, TOKENS_BS), compiled_forward(TINY)(untied, TOKENS_BS)
    )


@pytest.mark.parametrize(
    "config", [TINY, dataclasses.replace(UNROLLED, attention="einsum")], ids=["fused", "einsum"]
)
def test_mark_is_called_at_every_point_with_its_dims(config, tiny_params):
    sizes = {"B": 2, "S": 8, "T": 8, "H": 32, "N": 4, "K": 2, "D": 8, "V": 256}
    seen = {}

    def mark(name, x):
        seen[name] = x.shape
        return x

    params = tiny_params if config.scan_layers else model.unstack_layers(tiny_params)
    jax.eval_shape(lambda p, t: model.forward(p, t, config, mark), params, TOKENS_BS)
    expected = {}
    for name, dims in model.MARK_POINTS.items():
        merged = dims.endswith(")")
        shape = [sizes[dim] for dim in dims if dim in sizes]
        expected[name] = (*shape[:-2], shape[-2] * shape[-1]) if merged else tuple(shape)
    if config.attention != "einsum":
        del expected["attention_weights"]
    assert seen == expected


def test_every_attention_computes_the_same(tiny_params):
    want = compiled_forward(TINY)(tiny_params, TOKENS_BS)
    for attention in ("composite", "xla", "einsum"):
        config = dataclasses.replace(TINY, attention=attention)
        got = compiled_forward(config)(tiny_params, TOKENS_BS)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# Pieces, each against an independent computation


def test_rope_rotates_pairs_of_complex_numbers():
    x_BSND = np.random.default_rng(1).normal(size=(2, 5, 3, 8)).astype(np.float32)
    config = dataclasses.replace(TINY, head_dim=8, rope_theta=100.0)
    half = 4
    expected = np.empty_like(x_BSND)
    for position in range(5):
        for pair in range(half):
            z = x_BSND[:, position, :, pair] + 1j * x_BSND[:, position, :, pair + half]
            z = z * np.exp(1j * position * 100.0 ** (-2 * pair / 8))
            expected[:, position, :, pair] = z.real
            expected[:, position, :, pair + half] = z.imag
    rotated = model.apply_rope(jnp.asarray(x_BSND), model.rope_angles(jnp.arange(5), config))
    np.testing.assert_allclose(rotated, expected, rtol=1e-5, atol=1e-5)


def test_rope_makes_products_depend_on_distance_only():
    rng = np.random.default_rng(2)
    angles = model.rope_angles(jnp.arange(12), dataclasses.replace(TINY, head_dim=16))
    q, k = (
        model.apply_rope(
            jnp.broadcast_to(rng.normal(size=16).astype(np.float32), (1, 12, 1, 16)), angles
        )[0, :, 0]
        for _ in range(2)
    )
    products = np.asarray(q @ k.T)
    for distance in range(-3, 4):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)


def test_rms_norm():
    x = np.random.default_rng(3).normal(size=(2, 3, 8)).astype(np.float32)
    weight = jnp.arange(8, dtype=jnp.float32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * np.arange(8)
    np.testing.assert_allclose(model.rms_norm(jnp.asarray(x), weight, 0.5), expected, rtol=1e-5)


def test_attention_weights_against_numpy():
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(2, 2, 6, 3, 4)).astype(np.float32)
    scores = np.einsum("bsnd,btnd->bnst", q, k) / 2
    scores[..., np.triu_indices(6, 1)[0], np.triu_indices(6, 1)[1]] = -np.inf
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights = model.attention_weights(jnp.asarray(q), jnp.asarray(k))
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)


def test_cross_entropy_against_numpy():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(2, 3, 7)).astype(np.float32)
    targets = rng.integers(0, 7, (2, 3))
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, targets[..., None], -1)).mean()
    np.testing.assert_allclose(
        model.cross_entropy(jnp.asarray(logits), jnp.asarray(targets)), expected, 1e-6
    )


def test_loss_of_fresh_parameters_is_that_of_guessing(tiny_params):
    targets_BS = np.roll(TOKENS_BS, -1, axis=1)
    loss = jax.jit(functools.partial(model.loss, config=TINY))(tiny_params, TOKENS_BS, targets_BS)
    assert loss.dtype == jnp.float32
    assert abs(float(loss) - math.log(TINY.vocab_size)) < 0.1
