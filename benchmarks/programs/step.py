"""Llama training steps of any size, lowered by our compiler alone: they need no devices."""

import dataclasses
from typing import NamedTuple

import optax

import spmd
from spmd.models.llama import sharding
from spmd.models.llama.named import named_config
from spmd.models.llama.step import argument_types, train_step

UNLIMITED = 1 << 50
"""Bytes of memory that no program needs."""


class Step(NamedTuple):
    """One program: how many layers, whether scanned, on which mesh (axes joined by `:`)."""

    layers: int
    scan: bool
    mesh: str = "data=4:model=2"
    model: str = "llama2-7b"
    optimizer: str = "adamw"
    chip: str = "h200"
    memory_limit: int = UNLIMITED


def lower(step: Step) -> spmd.Lowered:
    """The whole compiler once on one training step."""
    axes = {name: int(size) for name, size in (p.split("=") for p in step.mesh.split(":"))}
    mesh = spmd.Mesh(None, tuple(axes.values()), tuple(axes))
    config = dataclasses.replace(
        named_config(step.model),
        num_hidden_layers=step.layers,
        scan_layers=step.scan,
        attention="einsum",  # ops that Shardy, the peer, knows, too
    )
    optimizer = optax.adamw(1e-4) if step.optimizer == "adamw" else optax.adafactor(1e-4)
    fn = train_step(config, optimizer, sharding.activation_marks(mesh, config))
    types = argument_types(config, optimizer, mesh, (2 * mesh.size, 1024))
    topology = spmd.Topology(f"{step.chip}:{mesh.size}")
    options = spmd.Options(memory_limit=step.memory_limit)
    jitted = spmd.jit(fn, mesh=mesh, donate_argnums=(0, 1), options=options)
    return jitted.lower(*types, topology=topology)
