"""The forward pass and its loss, scanned and unrolled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.models.llama import marks, model
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.program import generate, sample
from tests.models.llama.layers import unstack_layers
from tests.models.llama.made import forward

TINY = CONFIGS["tiny"]
UNROLLED = dataclasses.replace(TINY, scan_layers=False)
TOKENS_BS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 8)).astype(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_shape_and_dtype(dtype, tiny_params):
    config = dataclasses.replace(TINY, dtype=dtype)
    logits = jax.eval_shape(functools.partial(model.forward, config=config), tiny_params, TOKENS_BS)
    assert logits.shape == (2, 8, TINY.vocab_size)
    assert logits.dtype == jnp.dtype(dtype)


def test_tied_output_uses_the_embedding_and_every_attention_computes_the_same(tiny_params):
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    tied = {name: leaf for name, leaf in tiny_params.items() if name != "lm_head"}
    untied = {**tied, "lm_head": tied["embed_tokens"]}
    np.testing.assert_array_equal(
        forward(config)(tied, TOKENS_BS), forward(TINY)(untied, TOKENS_BS)
    )
    want = forward(TINY)(tiny_params, TOKENS_BS)
    for attention in ("composite", "xla", "einsum"):
        config = dataclasses.replace(TINY, attention=attention)
        got = forward(config)(tiny_params, TOKENS_BS)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config", [TINY, dataclasses.replace(UNROLLED, attention="einsum")], ids=["fused", "einsum"]
)
def test_mark_is_called_at_every_point_with_its_dims(config, tiny_params):
    sizes = {"B": 2, "S": 8, "T": 8, "H": 32, "N": 4, "K": 2, "D": 8, "V": 256}
    seen = {}

    def mark(name, x):
        seen[name] = x.shape
        return x

    params = tiny_params if config.scan_layers else unstack_layers(tiny_params)
    jax.eval_shape(lambda p, t: model.forward(p, t, config, mark), params, TOKENS_BS)
    expected = {}
    for name, dims in marks.MARK_POINTS.items():
        merged = dims.endswith(")")
        shape = [sizes[dim] for dim in dims if dim in sizes]
        expected[name] = (*shape[:-2], shape[-2] * shape[-1]) if merged else tuple(shape)
    if config.attention != "einsum":
        del expected["attention_weights"]
    assert seen == expected


def test_rms_norm():
    x = np.random.default_rng(3).normal(size=(2, 3, 8)).astype(np.float32)
    weight = jnp.arange(8, dtype=jnp.float32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * np.arange(8)
    np.testing.assert_allclose(model.rms_norm(jnp.asarray(x), weight, 0.5), expected, rtol=1e-5)


WINDOW = 8


def successor(params, tokens_1W, position):
    """Logits that are sure of the token after the last one."""
    del params
    return np.eye(256, dtype=np.float32)[(tokens_1W[0, position] + 1) % 256] * 100


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_continues_past_the_window(temperature):
    tokens = generate(successor, None, [1, 2, 3], tokens=20, window=WINDOW, temperature=temperature)
    assert tokens == list(range(4, 24))


def test_the_seed_decides_and_samples_follow_the_softmax():
    def flat_logits(params, tokens_1W, position):
        return np.zeros(256, np.float32)

    first, again, other = (
        generate(flat_logits, None, [0], tokens=10, window=WINDOW, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    probabilities = np.array([0.1, 0.2, 0.7])
    generator = np.random.default_rng(0)
    logits = np.log(probabilities).astype(np.float32)
    drawn = [sample(logits, 1.0, generator) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, probabilities, atol=0.03)


@pytest.mark.parametrize(
    ("prompt", "temperature", "message"),
    [([], 1.0, "prompt is empty"), ([1], -1.0, "temperature must not be negative")],
)
def test_bad_input(prompt, temperature, message):
    with pytest.raises(ValueError, match=message):
        generate(successor, None, prompt, tokens=1, window=WINDOW, temperature=temperature)
