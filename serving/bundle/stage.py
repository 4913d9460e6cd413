"""A planned and partitioned function: all that is needed to compile it, as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmd.api import Lowered
from spmd.ir.program import Program, Region
from spmd.ir.types import TensorType, numpy_dtype
from spmd.launch.agree import check_same_program, digest
from spmd.lowering.execute import executable
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.mesh.spec import jax_mesh, partition_spec
from spmd.options import Options

_WIDE = ("i64", "ui64", "f64")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One device's program and how its boundary lies on the mesh.

    Attributes:
      name: the function's, in the module.
      mesh: the mesh.
      module: the program of one device, StableHLO text.
      arguments, results: for each the atoms of the mesh that split its dims.
      argument_types: of the whole arrays; result_types: of one device's shards.
      donated: numbers of donated arguments.
      is_wide: whether there are 64-bit numbers in it.
    """

    name: str
    mesh: Mesh
    module: str
    arguments: tuple[tuple[Axes, ...], ...]
    results: tuple[tuple[Axes, ...], ...]
    argument_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    donated: tuple[int, ...]
    is_wide: bool

    @property
    def argument_specs(self) -> tuple[PartitionSpec, ...]:
        """How each argument is split, for jax."""
        return tuple(partition_spec(Sharding(dims), self.mesh) for dims in self.arguments)

    @property
    def result_specs(self) -> tuple[PartitionSpec, ...]:
        """How each result is split, for jax."""
        return tuple(partition_spec(Sharding(dims), self.mesh) for dims in self.results)


def stage_of(lowered: Lowered) -> Stage:
    """What is left of a lowered program once it has been emitted."""
    local, whole = lowered.stages.optimized, lowered.stages.imported.program
    return Stage(
        name=whole.name,
        mesh=lowered.mesh,
        module=lowered.stages.emitted,
        arguments=tuple(s.dims for s in local.arguments),
        results=tuple(s.dims for s in local.results),
        argument_types=tuple(whole.types[v] for v in whole.body.args),
        result_types=tuple(local.program.types[v] for v in local.program.body.results),
        donated=lowered.donated,
        is_wide=any(t.dtype in _WIDE for t in whole.types),
    )


def compile_stage(stage: Stage, options: Options) -> Any:
    """XLA's executable of a stage: it takes and returns flat arrays.

    Raises:
      LaunchError: another process of the job has another program.
      RuntimeError: XLA refuses it.
    """
    count = len(stage.result_types)
    boundary = Program(stage.name, stage.result_types, Region((), (), tuple(range(count))), (), ())
    arguments = tuple(map(Sharding, stage.arguments))
    results = tuple(map(Sharding, stage.results))
    partitioned = Partitioned(boundary, stage.mesh, arguments, results)
    more = {
        "shardings": digest(f"{stage.arguments} {stage.results}"),
        "donated arguments": str(stage.donated),
    }
    check_same_program(stage.name, stage.module, stage.mesh, jax_mesh(stage.mesh), more)
    structs = [jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for t in stage.argument_types]
    with jax.enable_x64(jax.config.read("jax_enable_x64") or stage.is_wide):
        jitted = executable(partitioned, stage.module, stage.donated)
        lowered = jitted.lower(*structs)
        return lowered.compile(dict(options.compiler_options) or None)
