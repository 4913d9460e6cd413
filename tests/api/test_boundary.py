"""What goes into a compiled program and comes out: key arrays, meshes of jax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd


@pytest.mark.parametrize("in_specs", [None, ((),)])
def test_key_arrays_without_keys(mesh: spmd.Mesh, in_specs: Any) -> None:
    keys = spmd.jit(lambda keys: keys, mesh=mesh, in_specs=in_specs)(
        jax.random.split(jax.random.key(0), 0)
    )
    assert keys.shape == (0,) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)


def test_shardings_and_formats_are_those_of_key_arrays(mesh: spmd.Mesh) -> None:
    """Not of their data, which have one dim more."""

    def fn(key: Any, keys: Any, x: jax.Array) -> Any:
        return jax.random.split(key), keys, x + jax.vmap(jax.random.uniform)(keys)

    def make(seed: int) -> Any:
        return jax.random.split(jax.random.key(seed), 8)

    specs = (None, ("data",), ("data",))
    key, keys, x = jax.random.key(0), make(1), jnp.ones(8)
    compiled = spmd.jit(fn, mesh=mesh, in_specs=specs, out_specs=specs).compile(key, keys, x)
    assert [sharding.spec for sharding in compiled.in_shardings] == [P(), P("data"), P("data")]
    assert [len(sharding.spec) for sharding in compiled.out_shardings] == [1, 1, 1]
    assert [placed.sharding for placed in compiled.in_formats] == list(compiled.in_shardings)
    assert [placed.sharding for placed in compiled.out_formats] == list(compiled.out_shardings)
    made = compiled.init(1, make, 1)
    assert made.sharding.is_equivalent_to(compiled.in_shardings[1], 1)
    got = compiled(jax.device_put(key, compiled.in_shardings[0]), made, x)
    assert got[1].sharding.is_equivalent_to(compiled.out_shardings[1], 1)
    for one, other in zip(got, fn(key, keys, x), strict=True):
        assert one.dtype == other.dtype
    np.testing.assert_allclose(got[2], fn(key, keys, x)[2], rtol=1e-6)


def test_arguments_are_placed_wherever_they_lie_at_the_time(mesh: spmd.Mesh) -> None:
    """At each call: jax's dispatch would take them as they lie."""

    def fn(x: jax.Array, keys: jax.Array, y: jax.Array) -> Any:
        return x + y, jax.vmap(jax.vmap(jax.random.uniform))(keys)

    x, keys = jnp.arange(64.0).reshape(8, 8), jax.random.split(jax.random.key(0), (8, 8))
    spec, wanted, devices = ("data", "model"), fn(x, keys, x), np.array(jax.devices())
    jitted: Any = spmd.jit(fn, mesh=mesh, in_specs=(spec, spec, None))
    meshes = [jax.make_mesh((4, 2), spec), jax.sharding.Mesh(devices[::-1].reshape(2, 4), spec)]
    places = [NamedSharding(m, P(*s)) for m in meshes for s in ((), ("model",), spec, spec[::-1])]
    for place in [devices[0], devices[3], *places]:
        moved = jax.device_put((x, keys), place)
        compiled = jitted.compile(*moved, x)
        for call in (jitted, compiled) * 3:
            for got, want in zip(call(*moved, np.asarray(x)), wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-6)
    assert jitted._cache_size() == len(places) + 1  # arrays without a mesh are of one kind


def test_settings_may_change_after_the_first_calls(mesh: spmd.Mesh) -> None:
    one, minus = jnp.ones(8), -jnp.ones(8)
    log, add = (
        spmd.jit(jnp.log, mesh=mesh),
        spmd.jit(lambda a, b, c: (a, b + c), mesh=mesh, donate_argnums=0),
    )
    for call in (log, log.compile(one)):
        assert np.isnan([call(minus), call(minus)]).all()
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="log returned"):
            call(minus)
    with jax.disable_jit():
        add(minus, one, one)
    with jax.enable_x64(True):
        structs = jax.ShapeDtypeStruct((8,), jnp.int64), jax.ShapeDtypeStruct((), jnp.int64)
        wide = jax.export.export(jax.jit(jnp.add))(*structs)
    compiled = spmd.compile_stablehlo(wide, mesh)
    for _ in range(3):  # jax narrows numbers
        (got,) = compiled(np.arange(8) << 40, np.int64(1))
        assert np.asarray(got)[7] == (7 << 40) + 1


class OfAnotherFramework:
    """A tensor that another framework holds, as DLPack shows it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, "float32 of another framework"

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_tensors_of_other_frameworks_are_shared_through_dlpack(mesh: spmd.Mesh) -> None:
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    double = spmd.jit(lambda x: x * 2, mesh=mesh, in_specs=(("data", "model"),))
    for _ in range(2):
        np.testing.assert_array_equal(double(OfAnotherFramework(x)), x * 2)


def test_results_and_arguments_without_elements(mesh: spmd.Mesh) -> None:
    """float0, the gradient of integers, is what it is under `jax.jit`: numpy's, and an argument."""

    def fn(i: Any, x: Any) -> Any:
        return jax.grad(lambda i, x: (x * i[:, None]).sum(), argnums=(0, 1), allow_int=True)(i, x)

    def vjp(params: Any, x: Any) -> Any:
        y, back = jax.vjp(lambda p: p["w"] * x + p["n"], params)
        return back(y)[0]

    i, x = np.arange(16), np.ones((16, 8), np.float32)
    for function, args in ((fn, (i, x)), (vjp, ({"w": np.float32(2), "n": np.int32(3)}, x))):
        step = spmd.jit(function, mesh=mesh)
        for _ in range(2):
            ours, theirs = step(*args), jax.jit(function)(*args)
            kinds = jax.tree.map(lambda a: (a.dtype, a.shape), (ours, theirs))
            assert kinds[0] == kinds[1]
        assert step.compile(*args).verify(*args)
    zeros, gradients = fn(i, x)
    passed = spmd.jit(lambda zeros, x: (zeros, x * 2), mesh=mesh)(zeros, gradients)
    assert passed[0].dtype == jax.dtypes.float0 == zeros.dtype
    np.testing.assert_array_equal(passed[1], gradients * 2)
