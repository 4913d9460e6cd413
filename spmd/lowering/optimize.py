"""The rewrites of the local program, in order."""

from __future__ import annotations

from spmd.ir.program import Program
from spmd.lowering.clock import Clock
from spmd.lowering.optimize_combine import combine
from spmd.lowering.optimize_dead import remove_dead
from spmd.lowering.optimize_dedupe import dedupe
from spmd.lowering.optimize_hoist import hoist
from spmd.lowering.optimize_narrow import narrow
from spmd.lowering.optimize_order import order
from spmd.lowering.optimize_regather import regather
from spmd.lowering.optimize_share import share_gathers
from spmd.lowering.optimize_slices import slice_collectives
from spmd.lowering.optimize_two_level import two_level
from spmd.lowering.room import Room
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology


def optimize(
    program: Program,
    mesh: Mesh,
    topology: Topology,
    combine_bytes: int,
    prefetch: int,
    room: Room,
) -> Program:
    """Applies every rewrite once, in the order in which one makes work for the next.

    Args:
      program: a local program.
      mesh: its mesh.
      topology: the machine, whose links decide between ways to do the same.
      combine_bytes, prefetch: see `Options`.
      room: the memory of one device.
    """
    program = dedupe(program)
    program = narrow(program)
    program = hoist(program, room)
    program = regather(program)
    program = dedupe(share_gathers(program))
    program = slice_collectives(program, mesh)
    program = remove_dead(program)
    clock = Clock(program, mesh, topology)
    program = combine(program, clock, combine_bytes)
    program = two_level(program, mesh, topology)
    return order(program, clock, prefetch, room)
