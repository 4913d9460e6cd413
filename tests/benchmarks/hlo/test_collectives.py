"""The reader of optimized HLO, on every form of every collective, and on what XLA really writes."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from benchmarks.hlo.collectives import HloCollective, hlo_collectives
from benchmarks.hlo.runs import matmul_flops
from spmd.errors import ArgumentError
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.measure.hlo import op_name_of, parse_module_text

FORMS, SLICED = (
    Path(__file__).with_name(f"{name}.txt").read_text() for name in ("forms", "sliced")
)
"""Modules in which the name of each collective that runs is what is to be read of it."""


def said(c: HloCollective) -> str:
    count = "?" if c.count == UNKNOWN_TRIPS else c.count
    return f"{c.kind} {c.bytes} x{count} of {c.group_size}" + (
        f" at {c.source}" if c.source else ""
    )


def test_every_form() -> None:
    """All ways to write groups, starts, loops, branches, calls, fusions and sources."""
    found = hlo_collectives(FORMS)
    assert [said(c) for c in found] == [c.op_name for c in found]
    assert len(found) == len(set(found)) == FORMS.count(" x")
    # An attribute may hold line breaks, as the TPU compiler writes what a kernel says of itself.
    (kernel,) = (i for i in parse_module_text(FORMS).computations["main"] if i.name == "kernel")
    assert op_name_of(kernel) == "kernel"


def test_unknown_trip_counts_that_matter_and_text_that_is_no_module_are_errors() -> None:
    with pytest.raises(ArgumentError, match="loop w3 communicates"):
        hlo_collectives(FORMS, guess_trips=False)
    before, unknown, after = FORMS.partition("%unknown")
    silent = before + unknown + after.replace("all-reduce(", "negate(", 1)
    found = hlo_collectives(silent, guess_trips=False)
    assert [said(c) for c in found] == [c.op_name for c in found]
    with pytest.raises(ArgumentError, match="no ENTRY"):
        hlo_collectives("module @main {}")


def test_all_reduces_of_which_slices_are_used() -> None:
    """128 bytes over 4 devices: an all-reduce sends 192, a reduce-scatter 96."""
    found = hlo_collectives(SLICED, scatter_slices=True)
    combined = [c for c in found if c.op_name == found[-1].op_name]
    assert [said(c) for c in found[:-2]] == [c.op_name for c in found[:-2]]
    assert ", ".join(map(said, combined)) == found[-1].op_name
    sums = [("all_reduce", 192)] * 6 + [("all_reduce", 288)]
    assert [(c.kind, c.bytes) for c in hlo_collectives(SLICED)] == sums


def test_arithmetic_of_dots_and_convolutions_in_loops_and_fusions_also_compiled() -> None:
    assert matmul_flops(FORMS) == 5 * 2 * 8 * 4 + 2 * (2 * 14 * 12 * 7) * (3 * 5 * 6)

    def layers(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]

    compiled = jax.jit(layers).lower(jnp.ones((8, 16)), jnp.ones((3, 16, 16))).compile()
    assert matmul_flops(str(compiled.as_text())) == 3 * 2 * 8 * 16 * 16


def test_a_compiled_program(devices8: Any) -> None:
    mesh = Mesh(np.array(devices8).reshape(4, 2), ("a", "b"))
    spec = PartitionSpec("a", "b")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def run(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            total = jax.lax.psum(jnp.sin(carry), "b")
            return jax.lax.ppermute(total, "a", [(i, (i + 1) % 4) for i in range(4)]), None

        looped, _ = jax.lax.scan(step, x, None, length=5)
        whole = jax.lax.all_gather(looped, "a", tiled=True)
        parts = jax.lax.psum_scatter(jnp.cos(whole), "a", tiled=True)
        return jax.lax.all_to_all(parts, "b", 0, 1, tiled=True).reshape(parts.shape)

    text = str(run.lower(jnp.ones((32, 16))).compile().as_text())
    found = {c.kind: (c.bytes, c.count, c.group_size) for c in hlo_collectives(text)}
    assert found == {  # one device's piece has 8 x 8 elements of f32: 256 bytes
        "all_reduce": (256, 5, 2),
        "collective_permute": (256, 5, 4),
        "all_gather": (768, 1, 4),
        "reduce_scatter": (768, 1, 4),
        "all_to_all": (128, 1, 2),
    }
    assert all(__file__ in c.source for c in hlo_collectives(text))
