"""`spmd.eqx.filter_jit` beside `eqx.filter_jit`."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from tests.greedy import greedy_plans as greedy_plans

eqx = pytest.importorskip("equinox")
import spmd.eqx  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nothing is split"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]

X = np.random.RandomState(0).randn(16, 8).astype(np.float32)
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def made() -> tuple[Any, Any]:
    model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def train(model: Any, state: Any, x: Any, name: str = "mean") -> Any:
    def loss(model: Any) -> Any:
        return getattr(jnp, name)(jax.vmap(model)(x) ** 2)

    value, gradient = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIMIZER.update(gradient, state)
    return eqx.apply_updates(model, updates), state, value, name


@pytest.mark.parametrize("donate", ["none", "all", "all-except-first"])
def test_steps(mesh: spmd.Mesh, donate: Any) -> None:
    runs = []
    for step in (eqx.filter_jit(train), spmd.eqx.filter_jit(train, mesh=mesh, donate=donate)):
        model, state = made()
        for name in ("mean", "mean", "sum"):
            model, state, value, said = step(model, state, jnp.asarray(X), name=name)
            assert said == name
        runs.append((eqx.filter(model, eqx.is_array), value))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *runs)


class Scaled(eqx.Module):  # type: ignore[misc,name-defined]
    """Multiplies all that it gets; whatever it takes has another shape, so that all is of use."""

    scale: Any

    def __call__(self, x: Any, /, *args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * self.scale[0, 0], (x, args, kwargs)), self.scale + 1


def add(x: Any, y: Any) -> Any:
    return x + 1, y + 1


DONATIONS = ("none", "all", "warn", "all-except-first", "warn-except-first")


@pytest.mark.parametrize("donate", DONATIONS)
def test_what_is_donated_is_what_equinox_donates(mesh: spmd.Mesh, donate: Any) -> None:
    def gone(jit: Any, **options: Any) -> list[bool]:
        a, b, c, scale, x, y = (
            spmd.mark_sharding(jnp.ones((8, 8 * n)), mesh, ("data",)) for n in range(1, 7)
        )
        jit(Scaled(scale), donate=donate, **options)(a, b, c=c)
        jit(add, donate=donate, **options)(y=y, x=x)
        return [array.is_deleted() for array in (a, b, c, scale, x, y)]

    assert gone(spmd.eqx.filter_jit, mesh=mesh) == gone(eqx.filter_jit)


def test_donated_arguments_are_gone_unless_there_are_none(mesh: spmd.Mesh) -> None:
    with pytest.raises(spmd.ArgumentError, match=r"donate='first' is no(?s:.*)'warn-except-first'"):
        spmd.eqx.filter_jit(add, mesh=mesh, donate="first")
    x = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",))
    for donate in ("warn", "all"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            spmd.eqx.filter_jit(jnp.sum, mesh=mesh, donate=donate)(x + 1)
        assert ("donated buffers" in "".join(str(w.message) for w in said)) == (donate == "warn")
    x, y = (spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",)) for _ in range(2))
    spmd.eqx.filter_jit(lambda x, y: (x + y, x - y), donate="all-except-first")(x, y)
    assert (x.is_deleted(), y.is_deleted()) == (False, True)


def test_a_module_as_the_function(mesh: spmd.Mesh) -> None:
    model, _ = made()
    compiled = spmd.eqx.filter_jit(model, mesh=mesh)
    np.testing.assert_allclose(compiled(X[0]), model(jnp.asarray(X[0])), rtol=1e-5)
    program = compiled.compile(X[0])
    assert any(name.startswith("function/layers/0") for name in program.request.arg_names)


def test_specs_by_the_users_own_parameters_and_of_results(mesh: spmd.Mesh) -> None:
    model, state = made()
    step = spmd.eqx.filter_jit(train, mesh=mesh, in_specs=(None, None, ("data",), None))
    compiled = step.compile(model, state, X)
    assert "model/layers/0/weight" in compiled.request.arg_names
    assert compiled.input_shardings[0][-1].spec[0] == "data"
    fn = spmd.eqx.filter_jit(lambda x: {"x": x + 1}, mesh=mesh, out_specs={"x": ("model", "data")})
    assert tuple(fn(jnp.ones((8, 8)))["x"].sharding.spec) == ("model", "data")


@pytest.mark.parametrize("name", ["static_argnums", "donate_argnames"])
def test_options_without_a_meaning_are_refused(mesh: spmd.Mesh, name: str) -> None:
    options: Any = {name: "x"}
    with pytest.raises(spmd.ArgumentError, match=f"has no {name}(?s:.*)'all-except-first' donates"):
        spmd.eqx.filter_jit(lambda x: x, mesh=mesh, **options)


def test_what_cannot_be_looked_up(mesh: spmd.Mesh) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        spmd.eqx.filter_jit(lambda x, s: x, mesh=mesh)(X, bytearray(b"a"))
