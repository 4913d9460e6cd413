"""Rotary embeddings and their scalings; frequencies beside transformers' for published models."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spmd.models.llama.config import ConfigError, RopeScaling
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.rope import apply_rope, rope_angles, rope_frequencies

TINY = CONFIGS["tiny"]


def test_powers_of_the_base_and_what_scalings_slow_down():
    llama31 = CONFIGS["llama3.1-8b"]
    scalings = None, RopeScaling(rope_type="linear", factor=4), llama31.rope_scaling
    plain, linear, scaled = (
        rope_frequencies(dataclasses.replace(llama31, rope_scaling=x)) for x in scalings
    )
    np.testing.assert_allclose(plain, 500_000.0 ** (-np.arange(64) / 64), rtol=1e-7)
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-7)
    short, long = plain > 8 * np.pi / 8192, plain < 2 * np.pi / 8192
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-7)
    slowed = (plain / scaled)[~short & ~long]
    assert len(slowed) > 5 and np.all((slowed < 8) & (np.diff(slowed, prepend=1) > 0))


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "llama3.1-8b", "llama3.2-1b"])
def test_frequencies_are_transformers(name):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from spmd.models.llama.weights.config import to_hf

    config = transformers.LlamaConfig(**to_hf(CONFIGS[name], "float32"))
    theirs = modeling.LlamaRotaryEmbedding(config).inv_freq.numpy()
    ours = rope_frequencies(CONFIGS[name])
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=3e-7)


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
    rotated = apply_rope(jnp.asarray(x_BSND), rope_angles(jnp.arange(5), config))
    np.testing.assert_allclose(rotated, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope_type 'ntk' is not supported"),
        ({"rope_type": "yarn", "factor": 2.0}, "yarn rope scaling needs beta_slow, beta_fast"),
        ({"rope_type": "linear", "factor": 0.5}, "must be at least 1, not 0.5"),
        ({"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "and nothing else"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor and"),
        (
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 16,
            },
            "0 < low_freq_factor < high_freq_factor, not 4.0 and 1.0",
        ),
    ],
)
def test_bad_scalings_are_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        RopeScaling(**fields)
