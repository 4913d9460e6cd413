"""Loops compute cheap invariants anew, piece by piece, and carry the others on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.propagation.uncarry import uncarry


def masked(x: Any, w: Any) -> Any:
    """Eight steps under a mask that jax hoists out of the loop, broadcast over the batch."""
    mask = jnp.broadcast_to(jnp.arange(16)[:, None] >= jnp.arange(16), (x.shape[0], 16, 16))

    def body(h: Any, _: Any) -> Any:
        return jnp.where(mask, jnp.einsum("bij,jk->bik", h, w), 0.0), None

    return jax.lax.scan(body, x, None, length=3)[0]


def compiled(mesh: spmd.Mesh) -> Any:
    x, w = np.ones((8, 16, 16), np.float32), np.full((16, 16), 0.1, np.float32)
    marked = spmd.mark_sharding(x, mesh, ("data", None, None))
    return spmd.jit(masked, mesh=mesh).compile(marked, w), (marked, w)


def test_no_device_holds_the_whole_mask() -> None:
    program, args = compiled(spmd.make_mesh(data=8))
    shapes = {t.shape for t in program.stages.optimized.program.types if t.rank == 3}
    assert (8, 16, 16) not in shapes
    np.testing.assert_allclose(program(*args), masked(*map(np.asarray, args)), rtol=1e-5)


def test_other_invariants_are_carried_on() -> None:
    program, _ = compiled(spmd.make_mesh(data=8))
    imported = program.stages.imported.program
    (loop,) = (op for op in imported.walk() if op.name == "stablehlo.while")
    carried = {t.shape for t in loop.kind.operands}
    assert (16, 16) in carried and (8, 16, 16) in carried  # w, and h; the mask is predicates
    assert not any(t.dtype == "i1" for t in loop.kind.operands)


def test_a_program_without_loops_stays_as_it_is() -> None:
    mesh = spmd.make_mesh(data=8)
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    program = spmd.jit(lambda x: x + 1, mesh=mesh).lower(x).stages.imported.program
    assert uncarry(program) is program
