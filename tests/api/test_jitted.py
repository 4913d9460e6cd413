"""`spmd.jit` as a user meets it: static arguments, caches, donation, where the mesh comes from."""

import copy
import functools
import inspect
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.api.jitted import JitOptions


def test_its_options_are_those_that_type_checkers_know() -> None:
    assert [*inspect.signature(spmd.jit).parameters][1:] == [*JitOptions.__annotations__]


def test_one_compilation_serves_arrays_where_it_put_them(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda w, s: (w * 2, s + w), mesh=mesh)
    w = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data", "model"))
    compiled = step.compile(w, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert compiled.in_shardings[1].spec == P("data", "model")
    state = compiled.init(1, lambda: jnp.zeros((8, 8)))
    for _ in range(3):
        w, state = step(w, state)
    assert sum(map(len, step._cache.values())) == 1
    np.testing.assert_allclose(state, np.full((8, 8), 7.0))


@pytest.mark.usefixtures("exact_plans")
def test_other_shardings_compile_anew(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x: x * 2, mesh=mesh)
    step(spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",)))
    out = step(spmd.mark_sharding(jnp.ones((8, 8)), mesh, (None, "model")))
    assert out.sharding.spec == P("data", "model")  # idle axes split what they can
    assert sum(map(len, step._cache.values())) == 2


def test_on_several_cpu_devices_a_call_ends_before_the_next(mesh: spmd.Mesh) -> None:
    # Two programs at once may wait for each other there, until the process is aborted.
    step = spmd.jit(lambda x: jnp.tanh(x @ x @ x), mesh=mesh)
    x: Any = step(spmd.mark_sharding(jnp.ones((512, 512)), mesh, ("data", "model")))
    for _ in range(3):
        x = step(x)
        assert x.is_ready()


def test_arguments_may_be_counted_from_the_end(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x, y, n: (x + y) * n, mesh=mesh, static_argnums=-1, donate_argnums=-2)
    x, y = (spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data", "model")) for _ in range(2))
    np.testing.assert_allclose(step(x, y, 3), np.full((8, 8), 6.0))
    assert y.is_deleted()
    assert not x.is_deleted()


def test_a_function_is_one_program_wherever_it_is_compiled_and_reports_name_it(
    devices8: Any,
) -> None:
    def f(x: Any) -> Any:
        for _ in range(2):
            x = jnp.tanh(x) + 2
        return x

    jitted = spmd.jit(f, mesh=spmd.make_mesh(data=8))
    here = jitted.lower(jnp.ones(8))
    assert here.as_text("emitted") == jitted.lower(jnp.ones(8)).as_text("emitted")
    functions = {frame.function for op in here.stages.program.walk() for frame in op.loc.frames}
    assert functions == {f.__qualname__}
    lowered = spmd.jit(functools.partial(Module()), mesh=spmd.make_mesh(data=8)).lower(jnp.ones(8))
    assert "program: Module of test_jitted.py\n" in lowered.explain()


class Module:
    def __call__(self, x: Any) -> Any:
        return x + 1


def test_functions_have_names() -> None:
    partials = functools.partial(jnp.add, 1), functools.partial(functools.partial(divmod), 1)
    fns: list[Any] = [Module(), *partials, jax.jit(lambda x: x)]
    names = [spmd.jit(fn, mesh=spmd.make_mesh(data=8)).__name__ for fn in fns]
    assert names == ["Module", "add", "divmod", "<lambda>"]


def test_it_may_take_the_place_of_jax_jit(mesh: spmd.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", spmd.jit)

    @jax.jit
    def step(x: Any) -> Any:
        jax.debug.callback(lambda total: None, x.sum())
        return jnp.tanh(x) @ x.T

    x = spmd.mark_sharding(np.eye(8, dtype=np.float32), mesh, ("data", None))
    np.testing.assert_allclose(step(x), np.tanh(1) * np.eye(8), rtol=1e-6)
    assert jax.grad(lambda x: step(x).sum())(x).shape == x.shape
    assert step.lower(x).compile()(x).shape == x.shape


def test_shapes_stand_for_arguments_that_nothing_needs(mesh: spmd.Mesh) -> None:
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    step = spmd.jit(lambda x, like: x + jnp.tanh(like @ like).shape[0], mesh=mesh)
    np.testing.assert_array_equal(step(jnp.ones(8), shape), np.full(8, 9.0))
    with pytest.raises(spmd.errors.ArgumentError, match=r"argument x of .* has no values"):
        step(jax.ShapeDtypeStruct((8,), jnp.float32), shape)


@spmd.jit(mesh=spmd.Mesh(None, (4, 2), ("data", "model")), donate_argnums=0)
def decorated(x: Any) -> Any:
    return x * 2


def plain(x: Any) -> Any:
    return x * 2


def test_it_is_copied_and_pickled_without_what_it_compiled(mesh: spmd.Mesh) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    specs = (NamedSharding(mesh, P("data")),)
    local = spmd.jit(lambda x: x * 2, mesh=mesh, in_specs=specs, donate_argnums=0)
    named = spmd.jit(plain, mesh=mesh, donate_argnums=0)
    local(np.ones((8, 8), np.float32))
    copies = [
        copy.deepcopy(local),
        pickle.loads(cloudpickle.dumps(local)),
        pickle.loads(pickle.dumps(named)),
        copy.deepcopy({"step": named})["step"],
    ]
    assert pickle.loads(pickle.dumps(decorated)) is copy.deepcopy(decorated) is decorated
    for again in (*copies, decorated):
        x = spmd.mark_sharding(np.ones((8, 8), np.float32), mesh, ("data",))
        if again is not decorated:
            assert "for 0 kinds of call" in repr(again)
        np.testing.assert_array_equal(again(x), 2 * np.ones((8, 8)))
        assert x.is_deleted()


def test_each_thread_takes_the_mesh_of_its_own_marks() -> None:
    first, second = spmd.make_mesh(a=8), spmd.make_mesh(b=4, c=2)
    is_tracing, other_is_done = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        is_tracing.set()
        assert other_is_done.wait(60)
        return spmd.mark_sharding(x * 2, first, ("a",))

    def quick(x: Any) -> Any:
        return spmd.mark_sharding(x * 3, second, ("b",))

    with ThreadPoolExecutor(1) as pool:
        lowering = pool.submit(lambda: spmd.jit(slow).lower(jnp.ones(8)).mesh)
        assert is_tracing.wait(60)
        assert spmd.jit(quick).lower(jnp.ones(8)).mesh == second
        other_is_done.set()
        assert lowering.result() == first


def test_an_axis_that_splits_nothing_is_named_once(devices8: Any) -> None:
    def twice(x: Any) -> Any:
        return jnp.tanh(x) * 2

    x, said = jnp.ones((4, 3)), "nothing is split over axis model"
    with pytest.warns(UserWarning, match=f"twice: {said}") as found:
        idle = spmd.jit(twice, mesh=spmd.make_mesh(data=4, model=2), in_specs=(("data",),)).lower(x)
    assert [warning.filename for warning in found] == [__file__]
    assert said in idle.summary()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used = spmd.jit(twice, mesh=spmd.make_mesh(data=4, one=1), in_specs=(("data",),)).lower(x)
    assert "nothing is split" not in used.summary()
