"""Programs that nobody wrote for this compiler: partitioned equals `jax.jit`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.explain.facts import Facts
from tests.corpus.program import MESHES, QUICK_MESH, Made, Program, mark
from tests.corpus.programs import PROGRAMS

TOLERANCE = {"float32": 1e-4, "complex64": 1e-4, "bfloat16": 2e-2, "float16": 2e-3}


@lru_cache(maxsize=2)
def reference(program: Program, mesh_name: str) -> tuple[Made, Any]:
    """The program, and what plain `jax.jit` makes of it."""
    made = program.made(spmd.make_mesh(**MESHES[mesh_name]))
    return made, jax.jit(made.fn)(*made.args)


def parameters() -> Iterator[Any]:
    """Every program on every mesh; the quick ones on one mesh are not marked heavy."""
    for program in PROGRAMS:
        for mesh in MESHES:
            heavy = program.heavy or mesh != QUICK_MESH
            marks = [pytest.mark.heavy] if heavy else []
            yield pytest.param(program, mesh, id=f"{program.name}-{mesh}", marks=marks)


def assert_same(path: Any, got: Any, want: Any) -> None:
    """Equal bits where the type is discrete, else close relative to the leaf's largest entry."""
    where = jax.tree_util.keystr(path)
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    assert got.dtype == want.dtype, where
    assert got.shape == want.shape, where
    name = str(want.dtype)
    got, want = np.asarray(got), np.asarray(want)
    if name not in TOLERANCE:
        np.testing.assert_array_equal(got, want, err_msg=where)
        return
    wide = np.complex128 if name == "complex64" else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.abs(want[np.isfinite(want)])
    scale = float(finite.max()) if finite.size else 0.0
    rtol = TOLERANCE[name]
    np.testing.assert_allclose(got, want, rtol, rtol / 5 * max(scale, 1e-3), err_msg=where)


@pytest.mark.parametrize(("program", "mesh_name"), list(parameters()))
def test_partitioned_equals_unpartitioned(program: Program, mesh_name: str) -> None:
    made, want = reference(program, mesh_name if program.on_mesh else QUICK_MESH)
    mesh = spmd.make_mesh(**MESHES[mesh_name])
    args = [mark(arg, word, mesh) for arg, word in zip(made.args, made.specs, strict=True)]
    compiled = spmd.jit(made.fn, mesh=mesh, options=spmd.Options(check=True)).compile(*args)
    got = compiled(*args)
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(want))
    jax.tree_util.tree_map_with_path(assert_same, got, want)
    # What the report says of the plan: one metric, in which nothing is better than the bound, and
    # the greedy plan is no better than this one.
    facts = Facts(compiled.stages, compiled.collectives)
    assert facts.least_seconds <= compiled.cost <= compiled.stages.plan.greedy_seconds
