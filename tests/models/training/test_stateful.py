"""Models that keep a state beside their parameters: trained as on one device, broken off or not."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.models.training.run.step import make_train_step
from spmd.models.training.trainer import Stateful, Trainer, TrainerOptions

ROWS, WIDTH, STEPS = 16, 8, 4


def init(key):
    w_key, key = jax.random.split(key)
    state = {"mean": jnp.zeros(WIDTH), "key": key, "count": jnp.zeros((), jnp.int32)}
    return Stateful({"w": jax.random.normal(w_key, (WIDTH, WIDTH))}, state)


def loss(variables, batch):
    params, state = variables
    key, now = jax.random.split(state["key"])
    y = batch["x"] @ params["w"]
    mean = y.mean(0)
    y = (y - mean) * jax.random.bernoulli(now, 0.8, y.shape)
    state = {"mean": 0.5 * (state["mean"] + mean), "key": key, "count": state["count"] + 1}
    return jnp.mean((y - batch["x"]) ** 2), state


def eval_loss(variables, batch):
    params, state = variables
    return jnp.mean((batch["x"] @ params["w"] - state["mean"] - batch["x"]) ** 2)


def data(step):
    x = np.random.default_rng(step).standard_normal((ROWS, WIDTH), np.float32)
    return {"x": x + np.arange(WIDTH, dtype=np.float32)}


def make_trainer(mesh, init=init, loss=loss, marks=None, eval_loss=eval_loss, **options):
    trainer = Trainer(
        init, loss, marks or {"params/w": (None, "up")}, data, mesh=mesh,
        batch_marks={"*": ("across",)}, optimizer=optax.sgd(1e-2, momentum=0.9),
        held_out=lambda step: data(100 + step), eval_loss=eval_loss,
        options=TrainerOptions(**{"eval_batches": 1, **options}),
    )  # fmt: skip
    trainer.console.quiet = True
    return trainer


def alone(init, loss, steps=STEPS):
    """The variables of plain jax on one device."""
    variables, optimizer = init(jax.random.key(0)), optax.sgd(1e-2, momentum=0.9)
    opt_state = optimizer.init(variables.params)

    @jax.jit
    def take(params, state, opt_state, batch):
        def of_params(p):
            return loss(Stateful(p, jax.tree.map(lambda x: x, state)), batch)

        grads, state = jax.grad(of_params, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return Stateful(optax.apply_updates(params, updates), state), opt_state

    for step in range(steps):
        variables, opt_state = take(*variables, opt_state, data(step))
    return variables


def comparable(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key, strict=True)]


def assert_same(found, expected):
    for one, other in zip(comparable(found), comparable(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("on_nonfinite", [pytest.param("stop", marks=pytest.mark.heavy), "skip"])
def test_half_of_a_run_on_one_mesh_and_half_on_another(tmp_path: Path, on_nonfinite):
    options = {"run_dir": tmp_path, "save_every": 2, "metrics": (), "on_nonfinite": on_nonfinite}
    make_trainer(spmd.make_mesh(across=4, up=2), steps=2, **options).run()
    outcome = make_trainer(spmd.make_mesh(across=2, up=4), steps=STEPS, **options).run()
    assert outcome.first["step"] == 3
    expected = alone(init, loss)
    assert_same(outcome.state.params, expected)
    assert outcome.state.params.state["key"].dtype == jax.random.key(0).dtype
    assert int(outcome.state.params.state["count"]) == STEPS
    assert outcome.eval_loss == pytest.approx(float(eval_loss(expected, data(100))), rel=1e-4)
    assert len(jax.tree.leaves(outcome.state.opt_state)) == 1  # momentum of w


def test_without_a_loss_of_evaluations_the_state_is_dropped():
    mesh = spmd.make_mesh(across=2, up=1, devices=jax.devices()[:2])
    outcome = make_trainer(mesh, eval_loss=None, steps=1).run()
    expected = loss(alone(init, loss, 1), data(100))[0]
    assert outcome.eval_loss == pytest.approx(float(expected), rel=1e-4)


def test_each_part_of_a_batch_has_the_state_of_the_one_before():
    mesh = spmd.make_mesh(across=2, up=2, devices=jax.devices()[:4])
    state = make_trainer(mesh, steps=2, microbatches=2).run().state.params.state
    assert int(state["count"]) == 4
    key = init(jax.random.key(0)).state["key"]
    for _ in range(4):
        key = jax.random.split(key)[0]
    np.testing.assert_array_equal(jax.random.key_data(state["key"]), jax.random.key_data(key))


@pytest.mark.thorough
def test_equinox_and_its_own_state():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):  # type: ignore[misc, name-defined]
        up: Any
        norm: Any
        scale: float  # no array: a leaf nevertheless

        def __init__(self, key: Any) -> None:
            self.up = eqx.nn.Linear(WIDTH, WIDTH, key=key)
            self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")
            self.scale = 0.5

        def __call__(self, x: Any, state: Any) -> Any:
            y, state = self.norm(self.up(x), state)
            return x + self.scale * y, state

    make = eqx.nn.make_with_state(Model)
    structs, _ = eqx.filter_eval_shape(make, jax.random.key(0))
    static = eqx.filter(structs, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))

    def init(key):
        model, state = make(key)
        return Stateful(eqx.filter(model, eqx.is_array), state)

    def loss(variables, batch):
        model = eqx.combine(variables.params, static)
        mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = mapped(batch["x"], variables.state)
        return jnp.mean((y - 1) ** 2), state

    marks = {"params/up/weight": ("up", None)}
    mesh = spmd.make_mesh(across=4, up=2)
    outcome = make_trainer(mesh, init, loss, marks, None, steps=STEPS).run()
    assert_same(outcome.state.params, alone(init, loss))


def test_parameters_without_a_gradient_are_named():
    def init(key):
        return {"w": jnp.ones((WIDTH, WIDTH)), "steps": jnp.zeros((), jnp.int32), "key": key}

    with pytest.raises(spmd.ArgumentError, match=r"2 of 3 .*\n.*key: key<fry>(?s:.*)Stateful"):
        make_trainer(spmd.make_mesh(across=4, up=2), init=init, marks={"w": ("up",)}, steps=1).run()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda state: None, r"in 3 leaves\n.*count: none"),
        (lambda state: {**state, "mean": state["mean"].astype(jnp.bfloat16)},
         r"in 1 leaves\n.*mean: bfloat16\[8\]\n.*mean: float32\[8\]"),
        (lambda state: {"mean": state["mean"]}, r"in 2 leaves\n.*count: none"),
    ],
)  # fmt: skip
def test_another_state_than_was_given(returned, message):
    def changed(variables, batch):
        value, state = loss(variables, batch)
        state = returned(state)
        return value if state is None else (value, state)

    with pytest.raises(spmd.ArgumentError, match=message):
        make_trainer(spmd.make_mesh(across=4, up=2), loss=changed, steps=1).run()


def test_a_state_that_init_does_not_know():
    trainer = make_trainer(
        spmd.make_mesh(across=4, up=2),
        init=lambda key: init(key).params,
        loss=lambda params, batch: loss(Stateful(params, init(jax.random.key(0)).state), batch),
        marks={"w": ("up",)},
        steps=1,
    )
    with pytest.raises(spmd.ArgumentError, match=r"without a state(?s:.*): metrics with .mean"):
        trainer.run()


def test_a_skipped_step_keeps_the_state():
    optimizer, variables = optax.sgd(1e-2), init(jax.random.key(0))
    step = jax.jit(make_train_step(loss, optimizer, on_nonfinite="skip"))
    bad = {"x": data(0)["x"].copy()}
    bad["x"][3, 3] = np.nan
    kept, opt_state, metrics = step(variables, optimizer.init(variables.params), bad)
    assert metrics["skipped"] == 1
    assert_same(kept, variables)
    changed, _, metrics = step(kept, opt_state, data(0))
    assert (metrics["skipped"], changed.state["count"]) == (0, 1)
    norm = optax.tree.norm(
        jax.grad(lambda p: loss(Stateful(p, kept.state), data(0))[0])(kept.params)
    )
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)  # of what is trained alone
