import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from spmd.models.training.errors import RunError
from spmd.models.training.run.optimizer import (
    NUMBERS,
    OPTIMIZERS,
    SCHEDULES,
    OptimizerConfig,
    decay_mask,
    default_learning_rate,
    make_optimizer,
    make_schedule,
    updated,
)


@pytest.mark.parametrize(
    ("schedule", "middle", "late", "end"),
    [("cosine", 0.55, 0.105, 0.1), ("linear", 0.55, 0.11, 0.1), ("constant", 1, 1, 1),
     ("wsd", 1.0, 0.145, 0.1)],
)  # fmt: skip
def test_schedules_by_name(schedule, middle, late, end):
    """Over 100 steps, the first ten of them a warmup; wsd falls in the last twenty."""
    config = OptimizerConfig(
        name="adamw", total_steps=110, learning_rate=1.0, warmup_steps=10, schedule=schedule,
        decay_fraction=20 / 110,
    )  # fmt: skip
    rate = make_schedule(config)
    assert float(rate(9)) < float(rate(10)) == 1
    assert float(rate(60)) == pytest.approx(middle)
    assert float(rate(109)) == pytest.approx(late, abs=5e-3)
    assert float(rate(110)) == pytest.approx(end)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total_steps", [1, 2, 10])
def test_short_runs_have_a_schedule(total_steps, schedule):
    rate = make_schedule(
        OptimizerConfig(name="adamw", total_steps=total_steps, learning_rate=0.5, schedule=schedule)
    )
    assert all(0 < float(rate(step)) < 1 for step in range(total_steps))


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (optax.polyak_sgd(), {"value": 2.0}),
        (optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()), {"value": 2.0}),
        (optax.MultiSteps(optax.polyak_sgd(), 2), {"value": 2.0}),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), {}),  # takes no other argument
        (optax.lbfgs(), None),
    ],
)
def test_optimizers_get_the_loss_if_they_want_it_and_no_function(rule, wanted):
    params, grads = jnp.ones(3), jnp.full(3, 0.5)
    given = grads, rule.init(params), params
    if wanted is None:
        with pytest.raises(RunError, match="as L-BFGS, line searches and Sophia do"):
            updated(rule, jnp.float32(2.0), *given)
    else:
        moved, _ = updated(rule, jnp.float32(2.0), *given)
        np.testing.assert_allclose(moved, params + rule.update(*given, **wanted)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sgdw"}, "no optimizer is called 'sgdw'; there are adamw, adafactor"),
        ({"schedule": "sine"}, "no schedule is called 'sine'; there are cosine, linear, const"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), not 1.0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, not 0.0"),
        *(({name: np.nan}, f"{name} must be") for names in NUMBERS.values() for name in names),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"name": "adamw", "total_steps": 10, "learning_rate": 0.1, **changes})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_larger_models_learn_more_slowly(name):
    rates = [default_learning_rate(name, count) for count in (10**6, 7 * 10**9)]
    assert rates[0] > rates[1] > default_learning_rate(name, 10**6, tuned=True) > 0


def test_norms_and_biases_are_not_decayed_as_adamw_does():
    params = {
        "layers": {"input_layernorm": {"weight": 0}, "q_proj": {"weight": 0, "bias": 0}},
        "norm": {"weight": 0},
    }
    assert decay_mask(params) == {
        "layers": {"input_layernorm": {"weight": False}, "q_proj": {"weight": True, "bias": False}},
        "norm": {"weight": False},
    }
    params = {"proj": jnp.ones((4, 4)), "norm": jnp.ones(4)}
    optimizer = make_optimizer(OptimizerConfig(name="adamw", total_steps=10, learning_rate=0.1))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    assert np.all(updates["proj"] < 0)
    assert np.all(updates["norm"] == 0)


def test_flax_names_are_known():
    """Of a real flax module, and of one of nnx: kernels are decayed, and nothing else."""

    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            x = linen.LayerNorm()(linen.Embed(8, 4)(ids))
            x = linen.GroupNorm(2)(linen.Dense(4, name="up")(x))
            return linen.MultiHeadDotProductAttention(2)(x)

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(params))
    decayed = {path[-1].key for path, is_decayed in mask if is_decayed}
    kept = {path[-1].key for path, is_decayed in mask if not is_decayed}
    assert decayed == {"kernel"}
    assert kept == {"bias", "scale", "embedding"}
    assert not any(jax.tree.leaves(decay_mask(nnx.state(nnx.LayerNorm(4, rngs=nnx.Rngs(0))))))


def test_betas_are_those_asked_for():
    """With both 0, AdamW's update is the gradient's sign times the rate."""
    config = OptimizerConfig(
        name="adamw", total_steps=10, learning_rate=1.0, warmup_steps=0, beta1=0.0, beta2=0.0,
        weight_decay=0.0, clip_norm=None,
    )  # fmt: skip
    optimizer = make_optimizer(config)
    params = {"w": jnp.zeros(3)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in ([1.0, -2.0, 3.0], [-4.0, 5.0, 6.0]):
        updates, state = update({"w": jnp.array(grads)}, state, params)
        np.testing.assert_allclose(np.sign(updates["w"]), -np.sign(grads))
    sizes = np.abs(updates["w"])
    np.testing.assert_allclose(sizes, sizes[0] * np.ones(3), rtol=1e-5)
