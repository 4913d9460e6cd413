"""Llama training steps of any size, lowered by our compiler alone: they need no devices."""

from typing import NamedTuple

import spmd
from benchmarks.compiled_ahead import Case, mesh_of, model_of, parse_axes

UNLIMITED = 1 << 50
"""Bytes of memory that no program needs."""


class Step(NamedTuple):
    """One program: how many layers, whether scanned, on which mesh (axes joined by `:`)."""

    layers: int
    scan: bool
    mesh: str = "data=4:model=2"
    model: str = "llama2-7b"
    memory_limit: int = UNLIMITED


def lower(step: Step) -> spmd.Lowered:
    """The whole compiler once on one training step."""
    mesh = mesh_of(parse_axes(step.mesh))
    # Einsums are ops that Shardy, the peer, knows, too.
    config = model_of(step.model, step.layers, scan_layers=step.scan, attention="einsum")
    machine, shape = spmd.Topology(f"h200:{mesh.size}"), (2 * mesh.size, 1024)
    options = spmd.Options(memory_limit=step.memory_limit)
    return Case(config, mesh, machine, shape, options=options).lower()
