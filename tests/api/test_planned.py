"""Programs that XLA has not seen, and their texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd


def test_lowering_needs_no_devices() -> None:
    mesh = spmd.Mesh(None, (32, 8), ("data", "model"))
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    w = spmd.mark_sharding(jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), mesh, (None, "model"))
    lowered = spmd.jit(lambda x, w: x @ w, mesh=mesh, in_specs=(("data",), None)).lower(
        x, w, topology=spmd.Topology("v5e:16x16")
    )
    assert "32x512xbf16" in lowered.as_text("local")


def test_every_stage_prints(mesh: spmd.Mesh) -> None:
    compiled = spmd.jit(lambda x: (x * 2).sum(), mesh=mesh, in_specs=(("data",),)).compile(
        np.ones(8, np.float32)
    )
    for stage in spmd.api.STAGES:
        assert compiled.as_text(stage)
    with pytest.raises(spmd.ArgumentError, match="unknown stage"):
        compiled.as_text("nonsense")
