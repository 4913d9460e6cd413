import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.training.run.optimizer import (
    OPTIMIZERS,
    OptimizerConfig,
    decay_mask,
    default_learning_rate,
    make_optimizer,
    make_schedule,
)


def test_schedule_warms_up_and_decays():
    config = OptimizerConfig(
        name="adamw", total_steps=100, learning_rate=1.0, warmup_steps=10, final_fraction=0.1
    )
    rates = [float(make_schedule(config)(step)) for step in range(101)]
    assert rates[0] > 0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.parametrize("total_steps", [1, 2, 10])
def test_short_runs_have_a_schedule(total_steps):
    schedule = make_schedule(
        OptimizerConfig(name="adamw", total_steps=total_steps, learning_rate=0.5)
    )
    assert all(0 < float(schedule(step)) < 1 for step in range(total_steps))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sgdw"}, "no optimizer is called 'sgdw'; there are adamw, adafactor"),
        ({"total_steps": 0}, "total_steps must be positive"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"name": "adamw", "total_steps": 10, "learning_rate": 0.1, **changes})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_larger_models_learn_more_slowly(name):
    assert default_learning_rate(name, 10**6) > default_learning_rate(name, 7 * 10**9) > 0


def test_norms_and_biases_are_not_decayed():
    params = {
        "layers": {"input_layernorm": {"weight": 0}, "q_proj": {"weight": 0, "bias": 0}},
        "norm": {"weight": 0},
    }
    assert decay_mask(params) == {
        "layers": {"input_layernorm": {"weight": False}, "q_proj": {"weight": True, "bias": False}},
        "norm": {"weight": False},
    }


def test_adamw_decays_weights_only():
    params = {"proj": jnp.ones((4, 4)), "norm": jnp.ones(4)}
    optimizer = make_optimizer(OptimizerConfig(name="adamw", total_steps=10, learning_rate=0.1))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert np.all(updates["proj"] < 0)
    assert np.all(updates["norm"] == 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_descend(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, total_steps=50, learning_rate=3e-2))
    target = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

    def loss_fn(params):
        return jnp.mean((params["weight"] - target) ** 2)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state, loss

    params = {"weight": jnp.ones((4, 4))}
    state = optimizer.init(params)
    losses = []
    for _ in range(50):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
