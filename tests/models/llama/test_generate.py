import functools

import jax
import numpy as np
import pytest

from models.llama import model
from models.llama.named import CONFIGS
from models.llama.trainer import generate, make_next_logits, sample

TINY = CONFIGS["tiny"]
WINDOW = 8


def successor(params, tokens_1W, position):
    """Logits that are sure of the token after the last one."""
    del params
    return np.eye(256, dtype=np.float32)[(tokens_1W[0, position] + 1) % 256] * 100


def test_next_logits_are_those_of_the_position(tiny_params):
    tokens_1W = np.arange(WINDOW, dtype=np.int32)[None]
    next_logits = jax.jit(make_next_logits(TINY))
    whole = jax.jit(functools.partial(model.forward, config=TINY))(tiny_params, tokens_1W)
    for position in (0, 3, WINDOW - 1):
        logits = next_logits(tiny_params, tokens_1W, np.int32(position))
        np.testing.assert_allclose(logits, whole[0, position], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_continues_past_the_window(temperature):
    tokens = generate(successor, None, [1, 2, 3], tokens=20, window=WINDOW, temperature=temperature)
    assert tokens == list(range(4, 24))


def test_the_seed_decides():
    def flat_logits(params, tokens_1W, position):
        return np.zeros(256, np.float32)

    first, again, other = (
        generate(flat_logits, None, [0], tokens=10, window=WINDOW, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_samples_follow_the_softmax():
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
