"""`Emitted`: one device's program as text, and all else that is needed to compile it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from spmd.ir.program import Callback
from spmd.ir.types import Dense, Order, TensorType, needs_x64
from spmd.lowering.emit import emit
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import has_parts, named_sharding, partition_spec

Placement = NamedSharding | Format
"""Where an array lies: on the devices of a mesh, and in an order of its own in their memory."""


class Constant(NamedTuple):
    """A constant that the program takes as one more argument: its elements and its sharding."""

    value: Dense
    sharding: Sharding


@dataclass(frozen=True)
class Emitted:
    """A local program as text and plain data, which can be stored, compared and compiled later."""

    name: str
    mesh: Mesh
    # StableHLO text with a function `main`, to be run on every device. It takes pieces of the
    # arguments, and behind them those of the constants
    module: str
    # arguments, results: shardings of the global arguments and results
    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    # argument_types, result_types: of the global arguments; of one device's pieces
    argument_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    # argument_orders, result_orders: in which order their dims lie in memory
    argument_orders: tuple[Order | None, ...]
    result_orders: tuple[Order | None, ...]
    donated: tuple[int, ...]  # flat indices of donated arguments
    needs_x64: bool
    callbacks: tuple[Callback, ...] = ()  # the Python functions that it calls, by number
    # peak_bytes, seconds: of one device and run, predicted where somebody asked for it
    peak_bytes: int | None = None
    seconds: float | None = None
    constants: tuple[Constant, ...] = ()  # what it takes behind its arguments

    @cached_property
    def boundary_mesh(self) -> Mesh:
        """The mesh; if part of an axis splits an argument or result, with an axis for each atom."""
        constants = [constant.sharding for constant in self.constants]
        ends = (*self.arguments, *constants, *self.results)
        has = any(has_parts(sharding, self.mesh) for sharding in ends)
        return self.mesh.refined() if has else self.mesh

    @property
    def argument_specs(self) -> tuple[PartitionSpec, ...]:
        """The `PartitionSpec` of each argument on `boundary_mesh`."""
        return tuple(partition_spec(sharding, self.boundary_mesh) for sharding in self.arguments)

    def argument_shardings(self, where: JaxMesh) -> tuple[NamedSharding, ...]:
        """Returns arguments' shardings on `where`, or a finer mesh if parts of axes split them."""
        return tuple(named_sharding(sharding, self.mesh, where) for sharding in self.arguments)

    def constant_shardings(self, where: JaxMesh) -> tuple[NamedSharding, ...]:
        """Returns the constants' shardings, as `argument_shardings` does."""
        return tuple(named_sharding(c.sharding, self.mesh, where) for c in self.constants)

    def result_shardings(self, where: JaxMesh) -> tuple[NamedSharding, ...]:
        """Returns the results' shardings, as `argument_shardings` does."""
        return tuple(named_sharding(sharding, self.mesh, where) for sharding in self.results)

    def major_to_minor(self) -> Emitted:
        """Returns the program with the default layout in memory for all arguments and results."""
        arguments, results = (None,) * len(self.arguments), (None,) * len(self.results)
        return replace(self, argument_orders=arguments, result_orders=results)


def formats(
    shardings: Sequence[NamedSharding], orders: Sequence[Order | None]
) -> tuple[Placement, ...]:
    """Returns each sharding as a `Format` with its order of dims, or as it is if that is None."""
    return tuple(
        sharding if order is None else Format(Layout(order), sharding)
        for sharding, order in zip(shardings, orders, strict=True)
    )


def emit_local(local: Partitioned, donated: tuple[int, ...] = ()) -> Emitted:
    """Emits a local program after `expand`; `donated` are flat indices of donated arguments."""
    program, mesh, arguments, results = local[:4]
    types, body = program.types, program.body
    count = len(body.args) - len(program.constants)
    wholes = []
    for value, sharding in zip(body.args[:count], arguments[:count], strict=True):
        dims = zip(types[value].shape, sharding.dims, strict=True)  # which their axes divide
        wholes.append(types[value].with_shape(tuple([n * mesh.extent(axes) for n, axes in dims])))
    return Emitted(
        name=program.name,
        mesh=mesh,
        module=emit(program, mesh),
        arguments=arguments[:count],
        results=results,
        argument_types=tuple(wholes),
        result_types=tuple(types[value] for value in body.results),
        argument_orders=local.argument_orders[:count] or (None,) * count,
        result_orders=local.result_orders or (None,) * len(results),
        donated=donated,
        needs_x64=needs_x64(types),
        callbacks=program.callbacks,
        constants=tuple(map(Constant, program.constants, arguments[count:])),
    )
