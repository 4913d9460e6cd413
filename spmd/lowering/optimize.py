"""The rewrites of the local program, in order."""

from __future__ import annotations

from spmd.ir.program import Program, Region, Value, free_values
from spmd.lowering.optimize_combine import SMALL_BYTES, combine
from spmd.lowering.optimize_dedupe import dedupe
from spmd.lowering.optimize_narrow import narrow
from spmd.lowering.optimize_reduce_scatter import reduce_scatter
from spmd.lowering.optimize_share import share_gathers
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
    return combine(program, combine_bytes)


def remove_dead(program: Program) -> Program:
    """Drops ops whose results nobody reads (effects are kept)."""

    def region(old: Region, needed: set[Value]) -> Region:
        needed |= set(old.results)
        kept = []
        for op in reversed(old.ops):
            effect = op.name == "stablehlo.custom_call" or not op.results
            if not effect and not any(v in needed for v in op.results):
                continue
            if op.regions:
                for inner in op.regions:
                    needed |= set(free_values(inner))
                op = op._replace(regions=tuple(region(r, set()) for r in op.regions))
            needed |= set(op.operands)
            kept.append(op)
        return Region(old.args, tuple(reversed(kept)), old.results)

    return program._replace(body=region(program.body, set()))
