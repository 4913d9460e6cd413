"""The rewrites of the local program, in order."""

from __future__ import annotations

from spmd.ir.program import Program
from spmd.lowering.optimize_combine import SMALL_BYTES, combine
from spmd.lowering.optimize_dead import remove_dead
from spmd.lowering.optimize_dedupe import dedupe
from spmd.lowering.optimize_narrow import narrow
from spmd.lowering.optimize_reduce_scatter import reduce_scatter
from spmd.lowering.optimize_share import share_gathers
from spmd.lowering.optimize_two_level import two_level
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology


def optimize(
    program: Program, mesh: Mesh, topology: Topology, combine_bytes: int = SMALL_BYTES
) -> Program:
    """Applies every rewrite once, in the order in which one makes work for the next.

    Args:
      program: a local program.
      mesh: its mesh.
      topology: the machine, whose links decide between ways to do the same.
      combine_bytes: see `Options`.
    """
    program = dedupe(program)
    program = narrow(program)
    program = dedupe(share_gathers(program))
    program = reduce_scatter(program, mesh)
    program = remove_dead(program)
    program = combine(program, combine_bytes)
    return two_level(program, mesh, topology)
