"""A training step of a Llama on a mesh, of devices that are here or of a slice that is not."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

import spmd
from benchmarks.llama_step import Step, argument_types, train_step
from spmd.models.llama import sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import named_config
from spmd.models.training.program import in_host


class Case(NamedTuple):
    """A training step on a mesh of a slice."""

    config: LlamaConfig  # the model
    mesh: spmd.Mesh  # with devices or without
    machine: spmd.Topology | None  # the slice; None: the devices of the mesh
    shape: tuple[int, int]  # sequences in a batch, and tokens in each
    table: sharding.SpecTable = sharding.TWO_D
    optimizer: optax.GradientTransformation = optax.adamw(1e-4)
    options: spmd.Options = spmd.Options()
    offload_optimizer: bool = False  # to the host's memory

    def step(self) -> Step:
        """The step, with the usual marks of activations."""
        marks = sharding.activation_marks(self.mesh, self.config, self.table)
        return train_step(self.config, self.optimizer, marks)

    def types(self) -> tuple[Any, Any, Any]:
        """The types of its arguments: parameters and batch are marked."""
        given = self.config, self.optimizer, self.mesh, self.shape, self.table
        params, state, batch = argument_types(*given)
        if self.offload_optimizer:
            state = jax.tree.map(functools.partial(in_host, self.mesh), state)
        return params, state, batch

    def lower(self) -> spmd.Lowered:
        """Plans the step."""
        jitted = spmd.jit(self.step(), mesh=self.mesh, donate_argnums=(0, 1), options=self.options)
        return jitted.lower(*self.types(), topology=self.machine)


def mesh_of(axes: Mapping[str, int]) -> spmd.Mesh:
    """A mesh without devices."""
    return spmd.Mesh(None, tuple(axes.values()), tuple(axes))


def parse_axes(text: str) -> dict[str, int]:
    """`data=4:model=2` as sizes of axes."""
    return {name: int(size) for name, size in (part.split("=") for part in text.split(":"))}


def model_of(name: str, layers: int = 0, **fields: Any) -> LlamaConfig:
    """A named model with other fields, and so many layers, or all of its own."""
    config = dataclasses.replace(named_config(name), **fields)
    return dataclasses.replace(config, num_hidden_layers=layers or config.num_hidden_layers)
