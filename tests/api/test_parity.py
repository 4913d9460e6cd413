"""`jax.jit`'s surface, call by call: the same code with `spmd.jit` in its place, the same numbers.

Each case is a function of `jit`, which is `jax.jit`, or `spmd.jit` with nothing added. All data is
placed on a mesh, so that no mesh need be named.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd

Jit = Any
AUTO = (AxisType.Auto, AxisType.Auto)


def mesh_of(types: tuple[AxisType, AxisType] = AUTO) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


def placed(spec: P, *shape: int, mesh: Any = None) -> Any:
    values = np.random.RandomState(len(shape) + shape[0]).randn(*shape).astype(np.float32)
    return jax.device_put(values, NamedSharding(mesh or mesh_of(), spec))


def w() -> Any:
    return placed(P(None, "model"), 16, 32)


def x() -> Any:
    return placed(P("data"), 8, 16)


def f(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).sum()


def sharding(*names: Any) -> NamedSharding:
    return NamedSharding(mesh_of(), P(*names))


CASES: dict[str, Callable[[Jit], Any]] = {}


def case(fn: Callable[[Jit], Any]) -> Callable[[Jit], Any]:
    CASES[fn.__name__] = fn
    return fn


# The signature.


@case
def in_shardings_without_static_arguments(jit: Jit) -> Any:
    def g(w: Any, n: int, x: Any, m: int = 1) -> Any:
        return f(w, x) * n * m

    shardings = (sharding(None, "model"), sharding("data"))
    scaled = jit(g, in_shardings=shardings, static_argnums=(1, 3))
    return scaled(np.asarray(w()), 2, np.asarray(x())), scaled(w(), 2, x(), 3)


@case
def out_shardings_of_a_tree(jit: Jit) -> Any:
    specs = {"y": sharding("data", "model"), "z": None}
    out = jit(lambda w, x: {"y": x @ w, "z": x}, out_shardings=specs)(w(), x())
    assert out["y"].sharding.spec == P("data", "model")
    return out


@case
def a_mesh_that_only_a_constraint_names(jit: Jit) -> Any:
    def g(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, sharding("data", "model"))

    out = jit(g)(np.ones((8, 16), np.float32))
    assert out.sharding.spec == P("data", "model")
    return out


@case
def specs_and_constraints_by_name_under_set_mesh(jit: Jit) -> Any:
    def g(w: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, P("data", "model"))

    arrays = np.asarray(w()), np.asarray(x())
    with jax.set_mesh(mesh_of()):
        out = jit(g, in_shardings=P(), out_shardings=P("data"))(*arrays)
        assert out.sharding.is_equivalent_to(sharding("data"), 2)
        return out, jit(g)(*arrays)


@case
def static_by_number_and_by_name(jit: Jit) -> Any:
    def g(w: Any, x: Any, mode: str = "b") -> Any:
        return f(w, x) if mode == "a" else f(w, x) * 2

    jitted = jit(g, static_argnums=(2,))
    by_name = jit(g, static_argnames="mode")(w(), x(), "a")
    return jitted(w(), x(), mode="a"), jitted(w(), x()), by_name


@case
def donated_by_number_and_by_name(jit: Jit) -> Any:
    found = []
    for options in ({"donate_argnums": 0}, {"donate_argnums": (0,)}, {"donate_argnames": "w"}):
        jitted, given, named = jit(lambda w, x: (w + 1, x.sum()), **options), w(), w()
        found += [jitted(given, x()), jitted(x=x(), w=named)]
        assert given.is_deleted() and named.is_deleted()
    return found


@case
def compiler_options(jit: Jit) -> Any:
    options = {"xla_embed_ir_in_executable": True}
    jitted = jit(f, compiler_options=options)
    return jitted(w(), x()), jit(f).lower(w(), x()).compile(compiler_options=options)(w(), x())


@case
def decorators(jit: Jit) -> Any:
    @jit
    def plain(w: Any, x: Any) -> Any:
        return f(w, x)

    @jit(static_argnums=2)
    def called(w: Any, x: Any, n: int) -> Any:
        return f(w, x) * n

    @functools.partial(jit, static_argnums=2)
    def partial(w: Any, x: Any, n: int) -> Any:
        """Words."""
        return f(w, x) * n

    assert partial.__doc__ == "Words."
    assert partial.__wrapped__(w(), x(), 2) is not None
    return plain(w(), x()), called(w(), x(), 2), partial(w(), x(), 3)


@case
def methods(jit: Jit) -> Any:
    class Model:
        def __init__(self) -> None:
            self.scale = 3.0

        @functools.partial(jit, static_argnums=0)
        def step(self, w: Any, x: Any) -> Any:
            return f(w, x) * self.scale

    return Model().step(w(), x())


@case
def stages(jit: Jit) -> Any:
    jitted = jit(f)
    traced = jitted.trace(w(), x())
    assert len(traced.jaxpr.in_avals) == 2
    lowered = traced.lower()
    compiled = lowered.compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert compiled.cost_analysis()
    assert lowered.in_tree == compiled.in_tree
    assert (
        lowered.out_info.shape == compiled.out_tree.unflatten([jitted.eval_shape(w(), x())]).shape
    )
    assert "stablehlo" in str(lowered.compiler_ir())
    jitted(w(), x())
    jitted.clear_cache()
    return compiled(w(), x()), jitted(w(), x()), jitted.lower(w(), x()).compile()(w(), x())


# A line each.

CASES |= {
    "in_shardings_for_all": lambda jit: jit(
        lambda a, b: a.sum(1) + b, in_shardings=sharding("data")
    )(np.ones((8, 2, 4)), np.ones((8, 4))),
    "in_shardings_in_part": lambda jit: jit(f, in_shardings=(None, sharding("data")))(w(), x()),
    "keep_unused_and_inline": lambda jit: jit(lambda w, x: w * 2, keep_unused=True, inline=True)(
        w(), x()
    ),
    "no_elements": lambda jit: jit(lambda x, e: (x.sum(), e, e.sum(), jnp.concatenate([e, x])))(
        x(), jnp.zeros((0, 16))
    ),
    "scalars": lambda jit: jit(lambda x, a, b, c, d: x * a + b + c * d)(
        x(), 2, np.float32(0.1), True, 1.5
    ),
    "nothing_in_a_tree": lambda jit: jit(lambda d: (d["x"] * 2, d["y"]))({"x": x(), "y": None}),
    "an_array_on_another_device": lambda jit: jit(f)(w(), jnp.asarray(np.asarray(x()))),
    "grad_around": lambda jit: jax.grad(jit(f))(w(), x()),
    "value_and_grad_inside": lambda jit: jit(jax.value_and_grad(f))(w(), x()),
    "vmap_around": lambda jit: jax.vmap(jit(f), in_axes=(None, 0))(w(), x()[:, None]),
    "checkpoint_around": lambda jit: jax.grad(jax.checkpoint(jit(f)))(w(), x()),
    "jit_around": lambda jit: jax.jit(lambda w, x: jit(f)(w, x) * 2)(w(), x()),
    "jit_inside": lambda jit: jit(lambda w, x: jax.jit(f)(w, x) * 2)(w(), x()),
    "in_a_scan": lambda jit: jax.lax.scan(jit(lambda c, x: (c + x, c * x)), jnp.zeros(16), x()),
    "a_closed_over_array": lambda jit: (lambda big: jit(lambda x: (x @ big).sum())(x()))(w()),
    "itself_inside": lambda jit: jit(lambda w, x: jit(f)(w, x) * 2)(w(), x()),
}


# Values and types.


@case
def weak_types(jit: Jit) -> Any:
    out = jit(lambda x, lr: (lr * 2, x * lr, 3.0))(x(), 0.1)
    assert [jax.typeof(o).weak_type for o in out] == [True, False, True]
    return out


@case
def a_loop_of_weak_types_compiles_once(jit: Jit) -> Any:
    count = []

    def step(n: Any, x: Any) -> Any:
        count.append(n)
        return n + 1, x * 2

    state = 0, x()
    jitted = jit(step)
    for _ in range(3):
        state = jitted(*state)
    assert len(count) == 1 or jit is jax.jit  # which looks at whether an array is committed
    return state


@case
def host_integers_beside_random_bits(jit: Jit) -> Any:
    def g(tokens: Any, x: Any, key: Any) -> Any:
        return jnp.take(x, tokens, axis=0) * jax.random.bernoulli(key, 0.5, (4, 1))

    return jit(g)(np.arange(4, dtype=np.int64), x(), jax.random.key(0))


@case
def sixty_four_bits(jit: Jit) -> Any:
    with jax.enable_x64(True):
        out = jit(lambda x, n: (x.sum(), n * 2, 1.5))(x(), np.arange(8, dtype=np.int64))
    assert out[1].dtype == jnp.int64
    return out


@case
def both_settings_of_64_bits(jit: Jit) -> Any:
    jitted = jit(lambda x, n: x.astype(jnp.float32).sum() + n)
    narrow = jitted(x(), 2.0)
    with jax.enable_x64(True):
        return narrow, jitted(x(), 2.0)


@case
def arguments_as_results(jit: Jit) -> Any:
    out = jit(lambda w, x: (w, x, w))(w(), x())
    assert out[2].sharding.spec == P(None, "model")
    return out


@case
def another_shape(jit: Jit) -> Any:
    jitted = jit(f)
    return jitted(w(), x()), jitted(w(), x()[:4]), jitted(w(), x())


@case
def nans(jit: Jit) -> Any:
    with jax.debug_nans(True):
        jitted = jit(lambda x: jnp.log(x))
        fine = jitted(jnp.abs(x()) + 1)
        with pytest.raises(FloatingPointError, match="invalid value"):
            jitted(x() * 0 - 1)
    return fine


@case
def without_jit(jit: Jit) -> Any:
    seen = []

    def g(x: Any) -> Any:
        seen.append(not isinstance(x, jax.core.Tracer))
        return x * 2

    with jax.disable_jit():
        out = jit(g)(x())
    assert seen == [True]
    return out


# Composing.


@case
def jvp_and_linearize_around(jit: Jit) -> Any:
    value, tangent = jax.jvp(jit(f), (w(), x()), (w(), x()))
    _, linear = jax.linearize(jit(f), w(), x())
    return value, tangent, linear(w(), x())


@case
def marks_inside_an_inner_program(jit: Jit) -> Any:
    inner = jit(
        lambda w, x: x @ w,
        in_shardings=(sharding(None, "model"), sharding("data")),
        out_shardings=sharding("data", "model"),
    )
    return jit(lambda w, x: inner(w, x) * 2)(w(), x()), jax.jit(inner)(w(), x())


@case
def tracers_of_other_functions(jit: Jit) -> Any:
    """A function that is called with constants, and uses what is being traced around it."""

    def loss(w: Any) -> Any:
        return jit(lambda x: f(w, x))(x())

    several = jax.vmap(loss)(jnp.stack([w(), w() * 2]))
    return jax.grad(loss)(w()), several, jax.jit(loss)(w()), jit(loss)(w())


@case
def tracers_that_leaked(jit: Jit) -> Any:
    kept: list[Any] = []

    def leak(x: Any) -> Any:
        kept.append(x * 2)
        return x

    jit(leak)(x())
    with pytest.raises(jax.errors.UnexpectedTracerError, match="leak"):
        jit(lambda x: x + kept[0])(x())
    return ()


# Meshes and types.

EXPLICIT = (AxisType.Explicit, AxisType.Explicit)


def types_of(tree: Any) -> list[str]:
    return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)]


@case
def explicit_types(jit: Jit) -> Any:
    mesh = mesh_of(EXPLICIT)
    a = placed(P("data", "model"), 8, 16, mesh=mesh)
    out = jit(lambda a: (a * 2, a.T, a.sum(0), a[:, None]))(a)
    assert types_of(out) == types_of(jax.jit(lambda a: (a * 2, a.T, a.sum(0), a[:, None]))(a))
    assert out[0].sharding.mesh == mesh
    return out


@case
def explicit_types_under_set_mesh(jit: Jit) -> Any:
    mesh = mesh_of(EXPLICIT)
    a, b = placed(P("data"), 8, 16, mesh=mesh), placed(P(None, "model"), 16, 32, mesh=mesh)

    def g(a: Any, b: Any) -> Any:
        y = jax.sharding.reshard(a @ b, P("data", None))
        return jnp.einsum("bi,bo->io", a, y, out_sharding=P("model")), y

    with jax.set_mesh(mesh):
        out = jit(g)(a, b)
        assert types_of(out) == types_of(jax.jit(g)(a, b))
        gradient = jit(jax.grad(lambda a, b: g(a, b)[1].sum()))(a, b)
    return out, gradient


@case
def explicit_types_of_host_arrays(jit: Jit) -> Any:
    with jax.set_mesh(mesh_of(EXPLICIT)):
        out = jit(lambda a: jax.sharding.reshard(a, P("data")) * 2)(np.ones((8, 4), np.float32))
    assert str(jax.typeof(out)) == "float32[8@data,4]"
    return out


@case
def explicit_results_are_arguments(jit: Jit) -> Any:
    a = placed(P("data", "model"), 8, 16, mesh=mesh_of(EXPLICIT))
    step = jit(lambda a: a * 2, donate_argnums=0)
    for _ in range(3):
        a = step(a)
    return a


THIN = ((1, 4, 2), ("batch", "data", "model"))
"""A mesh with an axis of size 1: it splits nothing, and is a part of types and specs."""


@case
def explicit_types_have_axes_of_size_1(jit: Jit) -> Any:
    mesh = jax.make_mesh(*THIN, axis_types=(AxisType.Explicit,) * 3)
    a = placed(P("batch", "data"), 8, 16, mesh=mesh)
    out = jit(lambda a: (a * 2, a.T, a.sum(0)))(a)
    assert types_of(out) == [
        "float32[8@batch,16@data]",
        "float32[16@data,8@batch]",
        "float32[16@data]",
    ]
    again = jit(lambda a, b: a + b.T)(out[0], out[1])
    assert types_of(again) == types_of(a)
    return out, again


@case
def results_have_the_specs_that_were_given(jit: Jit) -> Any:
    mesh = jax.make_mesh(*THIN, axis_types=(AxisType.Auto,) * 3)
    a = placed(P("batch", "data"), 8, 16, mesh=mesh)
    for spec in (P("batch", "data"), P(("batch", "data")), P("data"), P(None, "model")):
        given = NamedSharding(mesh, P(*spec))
        assert jit(lambda a: a * 2, out_shardings=given)(a).sharding == given
    return ()


@case
def explicit_axes_in_a_shard_map(jit: Jit) -> Any:
    mesh = mesh_of(EXPLICIT)
    a, b = placed(P("data"), 8, 16, mesh=mesh), placed(P(None, "model"), 16, 32, mesh=mesh)

    def g(a: Any, b: Any) -> Any:
        local = jax.shard_map(
            lambda a, b: jax.lax.psum(a @ b, "data"),
            mesh=mesh,
            in_specs=(P("data"), P(None, "model")),
            out_specs=P(None, "model"),
        )
        return local(jnp.sin(a), b) * 2

    with jax.set_mesh(mesh):
        out = jit(g)(a, b)
        assert types_of(out) == ["float32[2,32@model]"]
        return out, jit(jax.grad(lambda a, b: g(a, b).sum(), argnums=(0, 1)))(a, b)


@case
def under_a_mesh_of_another_shape(jit: Jit) -> Any:
    with jax.set_mesh(jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))):
        return jit(f)(w(), x())


@case
def arguments_on_meshes_of_other_axes(jit: Jit) -> Any:
    merged = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("all",))
    turned = jax.sharding.Mesh(mesh_of().devices.reshape(2, 4), ("a", "b"))
    g = jit(lambda w, x, y: (x @ w + y.T, w + 1, y * 2))
    return g(w(), placed(P("all"), 8, 16, mesh=merged), placed(P("b", "a"), 32, 8, mesh=turned))


@pytest.mark.filterwarnings("ignore:.*nothing is split")
@pytest.mark.filterwarnings("ignore:.*costs .* of a predicted run")
@pytest.mark.parametrize("name", CASES)
def test_the_same_as_jax_jit(name: str, devices8: Any) -> None:
    want, got = CASES[name](jax.jit), CASES[name](spmd.jit)
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (np.shape(a), jnp.result_type(a)) == (np.shape(b), jnp.result_type(b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
