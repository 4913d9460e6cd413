import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from models.llama import objective, parameters
from models.llama.named import CONFIGS
from tests.models.llama.inverse import stack_layers

TINY = CONFIGS["tiny"]
UNROLLED = dataclasses.replace(TINY, scan_layers=False)
TOKENS_BS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 8)).astype(np.int32)


def test_gradients_of_scan_equal_those_of_unrolled(tiny_params):
    def gradients(params, config):
        targets_BS = np.roll(TOKENS_BS, -1, axis=1)
        loss = functools.partial(objective.loss, config=config)
        return jax.jit(jax.grad(loss))(params, TOKENS_BS, targets_BS)

    scanned = gradients(tiny_params, TINY)
    unrolled = stack_layers(gradients(parameters.unstack_layers(tiny_params), UNROLLED))
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(assert_close, scanned, unrolled)


def test_cross_entropy_against_numpy():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(2, 3, 7)).astype(np.float32)
    targets = rng.integers(0, 7, (2, 3))
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, targets[..., None], -1)).mean()
    np.testing.assert_allclose(
        objective.cross_entropy(jnp.asarray(logits), jnp.asarray(targets)), expected, 1e-6
    )


def test_loss_of_fresh_parameters_is_that_of_guessing(tiny_params):
    targets_BS = np.roll(TOKENS_BS, -1, axis=1)
    loss = jax.jit(functools.partial(objective.loss, config=TINY))(
        tiny_params, TOKENS_BS, targets_BS
    )
    assert loss.dtype == jnp.float32
    assert abs(float(loss) - math.log(TINY.vocab_size)) < 0.1
