"""`spmd.nnx.jit` beside `nnx.jit`: modules updated in place, shared, returned, made."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from tests.greedy import greedy_plans as greedy_plans

nnx = pytest.importorskip("flax.nnx")
import spmd.nnx  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing is split")


class Net(nnx.Module):  # type: ignore[misc, name-defined]
    """A linear layer, dropout, a batch norm, and a counter."""

    def __init__(self, rngs: Any) -> None:
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.b = nnx.Linear(16, 8, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.b(self.norm(self.drop(nnx.relu(self.a(x)))))


def made() -> tuple[Any, Any]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


def train(model: Any, optimizer: Any, x: Any, scale: Any) -> Any:
    value, gradient = nnx.value_and_grad(lambda model: (model(x) ** 2).mean() * scale)(model)
    optimizer.update(model, gradient)
    return value, model


X = np.random.RandomState(0).randn(16, 8).astype(np.float32)


def both(mesh: spmd.Mesh, fn: Any, **options: Any) -> tuple[Any, Any]:
    return nnx.jit(fn, **options), spmd.nnx.jit(fn, mesh=mesh, **options)


def same_state(a: Any, b: Any) -> None:
    wanted, found = (jax.tree.leaves(nnx.state(m, nnx.Not(nnx.RngState))) for m in (a, b))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_steps_update_modules_in_place(mesh: spmd.Mesh) -> None:
    states = []
    for step in both(mesh, train, donate_argnums=1):
        model, optimizer = made()
        losses = []
        for _ in range(3):
            loss, again = step(model, optimizer, X, 0.5)
            assert again is model
            losses.append(float(loss))
        assert int(model.calls[...]) == 3
        states.append((model, losses))
    np.testing.assert_allclose(states[0][1], states[1][1], rtol=1e-4)
    assert len(set(states[1][1])) == 3  # dropout and weights change from step to step
    same_state(states[0][0], states[1][0])


def test_specs_and_names_also_without_devices(mesh: spmd.Mesh) -> None:
    model, optimizer = made()
    step = spmd.nnx.jit(train, mesh=mesh, in_specs=(None, None, ("data",), None))
    compiled = step.compile(model, optimizer, X, 0.5)
    assert "model/a/kernel/value" in compiled.request.arg_names
    assert "x" in compiled.request.arg_names
    place = compiled.request.arg_names.index("x")
    assert compiled.input_shardings[0][2].spec[0] == "data", place
    assert int(model.calls[...]) == 0
    lowered = spmd.nnx.jit(train, mesh=mesh).lower(*made(), X, scale=0.5, topology="h200:8")
    assert isinstance(lowered, spmd.Lowered) and lowered.target == spmd.Topology("h200:8")
    assert "model/a/kernel/value" in lowered.request.arg_names


def test_static_arguments_keywords_and_methods(mesh: spmd.Mesh) -> None:
    def fn(model: Any, x: Any, power: int, *, scale: Any) -> Any:
        return model.a(x) ** power * scale

    for step in both(mesh, fn, static_argnums=2):
        model, _ = made()
        want = (model.a(X) ** 2) * 3
        np.testing.assert_allclose(step(model, X, 2, scale=3.0), want, rtol=1e-4, atol=1e-5)


def test_specs_of_results_are_refused_and_plain_jit_warns_of_changes(mesh: spmd.Mesh) -> None:
    with pytest.raises(spmd.ArgumentError, match="mark results inside"):
        spmd.nnx.jit(lambda x: x, mesh=mesh, out_specs=("data",))
    model, _ = made()
    with pytest.warns(UserWarning, match=r"changes argument model.*spmd\.nnx\.jit"):
        spmd.jit(lambda model, x: model(x), mesh=mesh)(model, X)


def test_modules_that_are_made_inside(mesh: spmd.Mesh) -> None:
    def init(seed: Any) -> Any:
        return {"model": nnx.Linear(8, 16, rngs=nnx.Rngs(jax.random.key(seed))), "n": seed}

    found = [fn(3) for fn in both(mesh, init)]
    assert isinstance(found[1]["model"], nnx.Linear)
    same_state(found[0]["model"], found[1]["model"])


def test_modules_may_have_attributes_without_a_hash(mesh: spmd.Mesh) -> None:
    class Config:
        """Equal to those that are alike; unhashable, as dataclasses with lists are."""

        def __init__(self, scales: list[float]) -> None:
            self.scales = scales

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Config) and self.scales == other.scales

        __hash__ = None  # type: ignore[assignment]

    class Scaled(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, config: Config) -> None:
            self.w, self.config = nnx.Param(jnp.ones(8)), config

        def __call__(self, x: Any) -> Any:
            return x * self.w * sum(self.config.scales)

    step = spmd.nnx.jit(lambda model, x: model(x), mesh=mesh)
    for scales in ([1.0, 2.0], [1.0, 2.0], [3.0]):
        np.testing.assert_allclose(step(Scaled(Config(scales)), X), X * sum(scales), rtol=1e-6)
    assert step.jitted._cache_size() == 2
