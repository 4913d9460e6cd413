"""Functions that `jax.export` wrote, called inside of ours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.mesh.spec import jax_mesh

X, W = np.random.default_rng(0).standard_normal((2, 8, 8), np.float32)


def exported(of: spmd.Mesh, fn: Any, *specs: P) -> export.Exported:
    shardings = tuple(NamedSharding(jax_mesh(of), spec) for spec in specs)
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return export.export(jax.jit(fn, in_shardings=shardings))(struct, struct)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w).sum(0)


def in_regions(mesh: spmd.Mesh) -> Any:
    def body(x: Any, w: Any) -> Any:
        return jax.lax.psum(jnp.tanh(x @ w), "data")

    return jax.shard_map(body, mesh=jax_mesh(mesh), in_specs=(P("data"), P()), out_specs=P())


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 4, "model": 2}])
@pytest.mark.parametrize("is_manual", [False, True])
def test_a_function_for_eight_devices(sizes: dict[str, int], is_manual: bool) -> None:
    """On its own mesh and another one of as many devices, as `jax.jit` runs it."""
    own = spmd.make_mesh(data=8)
    saved = exported(own, in_regions(own) if is_manual else layer, P("data"), P())

    def fn(x: Any, w: Any) -> Any:
        return saved.call(x, w) * 2

    mesh = spmd.make_mesh(**sizes)
    x = jax.device_put(X, NamedSharding(jax_mesh(mesh), P("data")))
    np.testing.assert_allclose(spmd.jit(fn, mesh=mesh)(x, W), jax.jit(fn)(x, W), rtol=1e-5)


def test_for_another_number_of_devices() -> None:
    saved, mesh = exported(spmd.make_mesh(data=8), layer, P("data"), P()), spmd.make_mesh(data=4)
    with pytest.raises(spmd.MeshError, match="not over the same devices") as caught:
        spmd.jit(lambda x, w: saved.call(x, w), mesh=mesh)(X, W)
    assert "export a function that it calls" in str(caught.value.fix)
    assert "test_exported.py" in str(caught.value.source)
    again = export.export(jax.jit(layer))(X, W)  # as the error says: for one device
    ours = spmd.jit(lambda x, w: again.call(x, w), mesh=mesh)(X, W)
    np.testing.assert_allclose(ours, layer(X, W), rtol=1e-5)


@pytest.mark.thorough
def test_for_several_platforms() -> None:
    """An argument says which of them it is; the mesh knows."""
    (b,) = export.symbolic_shape("b")

    def fn(x: Any) -> Any:
        ways = {"cpu": lambda x: x * 2, "tpu": lambda x: x * 3, "cuda": lambda x: x * 4}
        return jnp.cumsum(x, 0) + jax.lax.platform_dependent(x, **ways)

    mesh = spmd.make_mesh(data=8)
    for shape, symbols in (((b, 8), {"b": 8}), (X.shape, None)):
        struct = jax.ShapeDtypeStruct(shape, X.dtype)
        saved = export.export(jax.jit(fn), platforms=("tpu", "cpu"))(struct)
        (ours,) = spmd.compile_stablehlo(saved, mesh, symbols=symbols)(X)
        np.testing.assert_allclose(ours, fn(X), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(spmd.jit(lambda x: saved.call(x), mesh=mesh)(X), ours, rtol=1e-5)  # noqa: B023
        with pytest.raises(spmd.SpmdError, match="which platform") as caught:
            spmd.compile_stablehlo(saved.mlir_module(), mesh, symbols=symbols)
        more = {"_platform_index": 1}
        assert str(more) in str(caught.value.fix).replace("0}", "1}")
        (ours,) = spmd.compile_stablehlo(
            saved.mlir_module(), mesh, symbols={**(symbols or {}), **more}
        )(X)
        np.testing.assert_allclose(ours, fn(X), rtol=1e-5, atol=1e-5)
    only = export.export(jax.jit(fn), platforms=("tpu", "cuda"))(X)
    with pytest.raises(spmd.SpmdError, match="was exported for tpu, cuda"):
        spmd.compile_stablehlo(only, mesh)
