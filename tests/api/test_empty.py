"""Values without elements, on meshes that divide little: nothing is sent for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

MESHES = {"5": spmd.Mesh(None, (5,), ("a",)), "2x3": spmd.Mesh(None, (2, 3), ("a", "b"))}
CHECKED = spmd.Options(check=True)
Z, FULL = np.zeros((0, 10), np.float32), np.arange(100, dtype=np.float32).reshape(10, 10) / 64


def program(mark: Any, z: Any, x: Any) -> dict[str, Any]:
    rows, columns = ("a", None), (None, "a")
    reduced = lax.reduce(z, np.float32(2), lambda a, b: a * b + b, (0,))
    windows = lax.reduce_window(z, 2.0, lax.add, (2, 1), (1, 1), [(3, 2), (0, 0)])
    looped = lax.fori_loop(0, 3, lambda i, c: (mark(c[0] * 2, rows), c[1] + c[0].sum()), (z, 1.0))
    branches = (lambda z: mark(z + 1, rows), lambda z: mark(z, columns))
    return {
        "marked": mark(mark(mark(z * 2, columns), rows), (None, None)),
        "joined": mark(jnp.concatenate([z, x, z]), rows),
        "padded": mark(jnp.pad(z, ((5, 5), (0, 0)), constant_values=3.0), rows),
        "reversed": mark(z[::-1], columns),
        "product": mark(x[:, :0] @ z, rows),
        "no product": mark(z @ z.T, columns),
        "sums": (mark(z.sum(0), "a"), z.max(0, initial=1.0), mark(reduced, "a"), windows),
        "indices": mark(jnp.argmax(z, 1), "a"),
        "sorted": mark(jnp.sort(z, 0), rows),
        "added": mark(x.at[jnp.zeros(0, int)].add(z), rows),
        "updated": mark(lax.dynamic_update_slice(x, z, (3, 0)), rows),
        "sliced": mark(mark(x, rows)[:0], (None, None)),
        "convolved": lax.conv_general_dilated(z[None], x[:, :0, None], (1,), [(5, 5)]),
        "looped": looped,
        "scanned": lax.scan(lambda c, row: (mark(c, rows), row.sum()), z, x),
        "chosen": lax.cond(x.sum() > 0, *branches, z),
        "gradient": jax.grad(lambda z: mark(z @ x, rows).sum() + (z**2).sum())(z),
    }


@pytest.mark.parametrize("mesh", MESHES)
def test_same_as_jax(mesh: str) -> None:
    where = MESHES[mesh]

    def marked(z: Any, x: Any) -> Any:
        return program(lambda v, spec: spmd.mark_sharding(v, where, spec), z, x)

    want = jax.jit(lambda z, x: program(lambda v, _: v, z, x))(Z, FULL)
    got = spmd.jit(marked, mesh=where, options=CHECKED)(Z, FULL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_nothing_is_sent() -> None:
    def marked(z: Any) -> Any:
        return spmd.mark_sharding(spmd.mark_sharding(z, MESHES["5"], (None, "a")) * 2, *whole)

    whole = MESHES["5"], (None, None)
    step = spmd.jit(marked, mesh=MESHES["5"], in_specs=(("a", None),), options=CHECKED)
    assert not step.lower(Z).collectives
    assert step(step(Z)).shape == Z.shape


@pytest.mark.parametrize("size", [5, 9, 11])
def test_a_marked_associative_scan(size: int) -> None:
    mesh, x = MESHES["5"], np.full((size, 3, 3), 0.25, np.float32)

    def scanned(mark: Any) -> Any:
        return lambda x: lax.associative_scan(lambda a, b: mark(b @ a), x)

    marked = scanned(lambda v: spmd.mark_sharding(v, mesh, ("a", None, None)))
    got = spmd.jit(marked, mesh=mesh, options=CHECKED)(x)
    np.testing.assert_allclose(got, jax.jit(scanned(lambda v: v))(x), rtol=1e-5)
