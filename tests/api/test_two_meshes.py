"""Programs with marks on several meshes over the same devices."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from benchmarks.hlo.collectives import hlo_collectives
from spmd.mesh.spec import jax_mesh
from spmd.options import Options

X = np.random.default_rng(0).standard_normal((16, 16), np.float32)
W = np.random.default_rng(1).standard_normal((16, 16), np.float32)
MESHES: Mapping[str, spmd.Mesh] = {
    "a=4,b=2": spmd.Mesh(None, (4, 2), ("a", "b")),
    "p=2,q=4": spmd.Mesh(None, (2, 4), ("p", "q")),
    "cube": spmd.Mesh(None, (2, 2, 2), ("p", "r", "q")),
    "one axis": spmd.Mesh(None, (8,), ("all",)),
    "transposed": spmd.Mesh([0, 2, 4, 6, 1, 3, 5, 7], (2, 4), ("p", "q")),
    "interleaved": spmd.Mesh([0, 4, 1, 5, 2, 6, 3, 7], (2, 4), ("p", "q")),
}
SPECS = {"one axis": ("all", None)}


def placed(mesh: spmd.Mesh, spec: Any) -> Mapping[Any, Any]:
    return NamedSharding(jax_mesh(mesh), P(*spec)).devices_indices_map(X.shape)


@pytest.mark.parametrize(
    ("other", "first"), [*((name, True) for name in list(MESHES)[1:]), ("cube", False)]
)
def test_each_mark_is_kept_on_its_own_mesh(other: str, first: bool) -> None:
    own, mesh, spec = MESHES["a=4,b=2"], MESHES[other], SPECS.get(other, ("p", "q"))

    def fn(x: Any, w: Any) -> Any:
        one = spmd.mark_sharding(jnp.tanh(x @ w), own, ("b", "a"))
        two = spmd.mark_sharding(jnp.cos(one) @ w, mesh, spec)
        return one, two, spmd.mark_sharding(two.sum(0), own, ("a",))

    def loss(w: Any) -> Any:
        return sum(jnp.sum(y**2) for y in fn(X, w))

    options = Options(check=True)
    compiled = spmd.jit(fn, mesh=own if first else mesh, options=options).compile(X, W)
    one, two, total = compiled(X, W)
    h = np.tanh(X @ W)
    np.testing.assert_allclose(one, h, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(two, np.cos(h) @ W, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(total, (np.cos(h) @ W).sum(0), rtol=1e-4, atol=1e-4)
    assert one.sharding.devices_indices_map(X.shape) == placed(own, ("b", "a"))
    assert two.sharding.devices_indices_map(X.shape) == placed(mesh, spec)
    got = spmd.jit(jax.grad(loss), mesh=own if first else mesh, options=options)(W)
    np.testing.assert_allclose(got, jax.grad(plain_loss)(W), rtol=1e-3, atol=1e-3)


def plain_loss(w: Any) -> Any:
    one = jnp.tanh(X @ w)
    two = jnp.cos(one) @ w
    return jnp.sum(one**2) + jnp.sum(two**2) + jnp.sum(two.sum(0) ** 2)


def test_the_mesh_of_the_first_mark_is_the_programs() -> None:
    def fn(x: Any) -> Any:
        y = spmd.mark_sharding(x * 2, MESHES["transposed"], ("p", "q"))
        return spmd.mark_sharding(y + 1, MESHES["one axis"], ("all",))

    compiled = spmd.jit(fn).compile(X)
    assert compiled.mesh == MESHES["transposed"]
    y = compiled(X)
    np.testing.assert_allclose(y, X * 2 + 1, rtol=1e-6)
    assert y.sharding.devices_indices_map(X.shape) == placed(MESHES["one axis"], ("all",))


def test_jax_constraints_of_another_order_of_devices() -> None:
    where = NamedSharding(jax_mesh(MESHES["transposed"]), P("q", "p"))

    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.sin(x), where)

    y = spmd.jit(fn, mesh=MESHES["a=4,b=2"])(X)
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-5, atol=1e-6)
    assert y.sharding.devices_indices_map(X.shape) == where.devices_indices_map(X.shape)
    assert y.sharding.spec == P("a", "b")


def test_parts_of_axes_at_the_boundary_send_nothing() -> None:
    module = """module {
      sdy.mesh @m = <["p"=2, "q"=4]>
      func.func @main(%x: tensor<16x16xf32> {sdy.sharding = #sdy.sharding<@m, [{"q"}, {"p"}]>},
          %y: tensor<16x16xf32>) -> tensor<16x16xf32> {
        %0 = stablehlo.sine %x : tensor<16x16xf32>
        %1 = stablehlo.add %0, %y : tensor<16x16xf32>
        return %1 : tensor<16x16xf32>
      }
    }"""
    mesh = spmd.make_mesh(a=4, b=2)
    compiled = spmd.compile_stablehlo(module, mesh, [None, ("a", None)], updates=[(0, 0)])
    marked, whole = compiled.in_shardings
    wanted = placed(MESHES["p=2,q=4"], ("q", "p"))
    assert marked.devices_indices_map(X.shape) == wanted
    assert marked.mesh.axis_names == ("a.0", "a.1", "b")
    assert (whole.mesh.axis_names, whole.spec) == (("a", "b"), P("a", None))
    first = jax.device_put(X, marked)
    result = compiled(first, W)
    np.testing.assert_allclose(result[0], np.sin(X) + W, rtol=1e-5, atol=1e-6)
    assert result[0].sharding == marked
    assert first.is_deleted()
    listed, made = compiled.collectives, hlo_collectives(compiled.as_text("hlo"))
    assert sorted(c.kind for c in listed) == sorted(c.kind for c in made)


def test_jax_takes_one_order_of_devices() -> None:
    """Other meshes that cannot meet are in tests/mesh/test_refinement.py."""

    def orders(x: Any) -> Any:
        for name in ("p=2,q=4", "transposed"):
            where = NamedSharding(jax_mesh(MESHES[name]), P("p", "q"))
            x = jax.lax.with_sharding_constraint(x * 2, where)
        return x

    with pytest.raises(spmd.MeshError, match=r"one order of devices(?s:.*)spmd\.mark_sharding"):
        spmd.jit(orders, mesh=MESHES["a=4,b=2"]).lower(X)
