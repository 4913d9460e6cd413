import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.models.llama.experts import counted
from spmd.models.training.run.balance import BIAS, Balance
from spmd.models.training.run.optimizer import (
    OPTIMIZERS,
    OptimizerConfig,
    make_optimizer,
    make_schedule,
    updates_taken,
)
from spmd.models.training.run.step import loss_and_grads, make_train_step, split_batch
from tests.models.llama.made import assert_close

ROWS, WIDTH = 16, 8


def loss_fn(params, batch):
    """Mean over rows, or over their weights, of a small network's squared error."""
    hidden = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    errors = jnp.mean((hidden - batch["y"]) ** 2, axis=-1)
    if "weights" not in batch:
        return jnp.mean(errors)
    return jnp.sum(errors * batch["weights"]) / jnp.sum(batch["weights"])


@pytest.fixture(scope="module")
def params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "w": jax.random.normal(keys[0], (WIDTH, 16)),
        "v": jax.random.normal(keys[1], (16, WIDTH)),
    }


def make_batch(*, weighted=False):
    generator = np.random.default_rng(0)
    batch = {name: generator.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}
    if weighted:  # whole microbatches with hardly any weight among them
        batch["weights"] = generator.integers(0, 2, ROWS).astype(np.float32)
        batch["weights"][::4] = 0.25
    return batch


def marked(x, mesh, rows):
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return spmd.mark_sharding(struct, mesh, (rows, *[None] * (x.ndim - 1)))


# Accumulation


@pytest.mark.parametrize("weighted", [False, True])
def test_microbatches_add_up_to_the_batch(params, weighted):
    batch = make_batch(weighted=weighted)
    split = jax.jit(functools.partial(loss_and_grads, loss_fn), static_argnums=2)
    loss, _, grads = split(params, batch, 1)
    for microbatches in (2, 4):
        parts_loss, _, parts = split(params, batch, microbatches)
        np.testing.assert_allclose(parts_loss, loss, rtol=1e-6)
        assert_close(parts, grads, rtol=1e-4, atol=1e-6)


def test_gradients_keep_their_dtype_and_are_summed_in_float32(params):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    jaxpr = str(jax.make_jaxpr(lambda p, b: loss_and_grads(loss_fn, p, b, 4))(params, make_batch()))
    _, _, grads = jax.eval_shape(lambda b: loss_and_grads(loss_fn, params, b, 4), make_batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    assert "f32[8,16] = add" in jaxpr


def test_loads_of_experts_are_sums_and_move_biases(params):
    """They are neither weighted nor divided, though microbatches are."""

    def loss(params, batch):
        taken = jnp.sum(batch["x"] > 0, axis=0, dtype=jnp.float32)
        return loss_fn(params, batch | {"x": counted(batch["x"], params[BIAS], taken, False)})

    batch, balance = make_batch(weighted=True), Balance(rate=0.5)
    _, _, grads = loss_and_grads(loss, params | {BIAS: jnp.zeros(WIDTH)}, batch, 4, balance)
    loads = np.sum(batch["x"] > 0, axis=0)
    np.testing.assert_array_equal(grads[BIAS], loads)
    assert set(np.sign(loads.mean() - loads)) == {-1, 1} and loads.mean() % 1
    moved = balance.moved(jnp.ones(WIDTH), grads[BIAS])
    np.testing.assert_array_equal(moved, 1 + 0.5 * np.sign(loads.mean() - loads))


def test_rows_of_a_microbatch_come_from_everywhere():
    assert split_batch({"x": np.arange(8)}, 4)["x"].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="3 microbatches do not divide a batch of 8 rows"):
        split_batch({"x": np.arange(8)}, 3)


@pytest.mark.usefixtures("exact_plans")
def test_gradients_are_reduced_once_however_many_microbatches(params):
    """And nothing moves to cut the batch: a sum for the gradients and the loss is all there is."""
    mesh, state = spmd.make_mesh(data=8), optax.sgd(0.1).init(params)
    batch = {name: np.tile(x, (256, 1)) for name, x in make_batch().items()}
    whole = {name: marked(x, mesh, None) for name, x in params.items()}
    split = {name: marked(x, mesh, "data") for name, x in batch.items()}
    step = make_train_step(loss_fn, optax.sgd(0.1), microbatches=4)
    compiled = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1)).compile(whole, state, split)
    found = {(c.kind, c.axes, c.count) for c in compiled.collectives}
    assert found == {("all_reduce", ("data",), 1)}

    expected = jax.jit(make_train_step(loss_fn, optax.sgd(0.1)))(params, state, batch)
    got = compiled(*jax.tree.map(np.array, (params, state, batch)))  # copies: they are donated
    assert_close(got, expected, rtol=1e-4, atol=1e-6)


# The guard


def test_a_skipped_step_changes_nothing(params):
    optimizer = optax.adamw(1e-2)
    step = jax.jit(make_train_step(loss_fn, optimizer, on_nonfinite="skip"))
    state = optimizer.init(params)
    bad = make_batch()
    bad["x"][3, 3] = np.nan
    kept, kept_state, metrics = step(params, state, bad)
    assert metrics["skipped"] == 1
    assert np.isnan(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, (kept, kept_state), (params, state))
    moved, moved_state, metrics = step(kept, kept_state, make_batch())
    assert metrics["skipped"] == 0
    assert not np.array_equal(moved["w"], params["w"])
    assert [int(updates_taken(s)) for s in (state, moved_state)] == [0, 1]


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
@pytest.mark.parametrize(
    ("rule", "slope", "broken"),
    [
        (optax.rmsprop(1e-3, eps=0.0, eps_in_sqrt=False), 300.0, "update_norm"),  # 0 / 0
        (optax.sgd(np.inf), 300.0, "update_norm"),
        (optax.sgd(200.0), 300.0, "update_norm"),  # parameters are too large for float16
        (optax.sgd(0.0), 1e5, "grad_norm"),  # gradients are
    ],
)
def test_gradients_or_updates_alone_may_be_infinite(rule, slope, broken, on_nonfinite):
    params, batch = jnp.full(3, -3e4, jnp.float16), jnp.array([slope, slope, 0])
    step = make_train_step(lambda p, b: jnp.sum(p * b), rule, on_nonfinite=on_nonfinite)
    moved, state, metrics = jax.jit(step)(params, rule.init(params), batch)
    assert next(name for name, value in metrics.items() if not np.isfinite(value)) == broken
    if on_nonfinite == "skip":
        jax.tree.map(np.testing.assert_array_equal, (moved, state), (params, rule.init(params)))
    else:
        assert not np.isfinite(moved).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_descends_at_the_learning_rate_of_the_schedule(params, name):
    config = OptimizerConfig(name=name, total_steps=10, learning_rate=1e-2, warmup_steps=4)
    optimizer, schedule = make_optimizer(config), make_schedule(config)
    step = jax.jit(make_train_step(loss_fn, optimizer, schedule=schedule))
    state, losses = optimizer.init(params), []
    for number in range(3):
        params, state, metrics = step(params, state, make_batch())
        np.testing.assert_allclose(metrics["learning_rate"], schedule(number), rtol=1e-6)
        losses.append(metrics["loss"])
    assert losses[2] < losses[1] < losses[0]
