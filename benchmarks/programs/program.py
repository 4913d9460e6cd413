"""What a benchmark program is: a name, a mesh, and a function with marked and open arguments."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import spmd


class Built(NamedTuple):
    """A program for one mesh, ready to be compiled by either partitioner."""

    # an ordinary single-device function; marks inside it are jax's sharding constraints
    fn: Callable[..., Any]
    # pytrees of `ShapeDtypeStruct`s. One with a sharding is marked, one without is open.
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()  # numbers of the arguments that are donated


class Program(NamedTuple):
    """A line of the table."""

    name: str  # family, variant and mesh, as in `llama-train/2d-scan@4x2`
    axes: Mapping[str, int]  # axis names and sizes of the mesh
    build: Callable[[spmd.Mesh], Built]  # makes the program on a mesh with these axes

    @property
    def family(self) -> str:
        """What comes before the first slash: programs are averaged within their family."""
        return self.name.partition("/")[0]

    def make(self) -> tuple[spmd.Mesh, Built]:
        """The mesh and the program on it."""
        mesh = spmd.make_mesh(**self.axes)
        return mesh, self.build(mesh)


MESHES: Mapping[str, Mapping[str, int]] = {
    "8x1": {"data": 8, "model": 1},
    "4x2": {"data": 4, "model": 2},
    "2x4": {"data": 2, "model": 4},
    "1x8": {"data": 1, "model": 8},
    "2x4x1": {"stage": 2, "data": 4, "model": 1},
    "2x2x2": {"stage": 2, "data": 2, "model": 2},
}


def on_meshes(name: str, build: Callable[[spmd.Mesh], Built], *meshes: str) -> list[Program]:
    """The same program on some of `MESHES`."""
    return [Program(f"{name}@{mesh}", MESHES[mesh], build) for mesh in meshes]


def struct(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An open argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


def marked(mesh: spmd.Mesh, spec: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """An argument with a sharding."""
    return spmd.mark_sharding(struct(shape, dtype), mesh, spec)


def structs_of(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, as open arguments."""
    return jax.tree.map(lambda s: struct(s.shape, s.dtype), jax.eval_shape(fn, *args))


def training_step(value_and_grad: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """(params, state, *batch) -> (params, state, loss)."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        loss, grads = value_and_grad(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def small_machine() -> spmd.Topology:
    """Eight devices as much slower than H200s as a benchmark's programs are smaller than real ones.

    Matrix products of a test's size do some 20 operations for each byte that is sent, real ones
    thousands; memory is 20 times as fast as the links on both; and what bounds small programs on
    real machines, the number of messages, costs next to nothing: this is about bytes. So nothing is
    hidden behind arithmetic, either.
    """
    cpu = spmd.Topology("cpu:8")
    ici = cpu.chip.ici._replace(latency=1e-9)
    chip = dataclasses.replace(cpu.chip, hbm_bandwidth=20 * ici.bandwidth, ici=ici, overlap=0.0)
    return spmd.Topology(cpu.name, chip)


def forget() -> None:
    """Empties what planning remembers of one program for the next."""
    for module in [module for name, module in sys.modules.items() if name.startswith("spmd.")]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
