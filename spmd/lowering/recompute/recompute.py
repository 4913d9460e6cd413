"""Recomputation: a program that does not fit makes values again rather than holding them.

Every byte that is held at the fullest moment gets a price. What is worth less than its price is
made again where it is read: in the backward loop of a scan instead of being collected by its
forward loop, or behind the fullest moment of a block instead of being held across it. A weight may
be gathered again, an elementwise chain, a norm or a product computed again: whatever saves the most
memory for its seconds. It is the trade-off of Jain et al., "Checkmate" (MLSys 2020), relaxed by a
price of memory so that minimum cuts solve it.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.ir.program import Op, Program, Region
from spmd.ir.rewrite import dedupe, remove_dead
from spmd.lowering.recompute.again import Costs
from spmd.lowering.recompute.block import recompute_in_block
from spmd.lowering.recompute.loops import recompute_in_loops
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.planning.plan import Recomputed
from spmd.predict.memory import peak_memory

ROUNDS = 4
"""Moments of a program that are relieved, the fullest first."""


def recompute(
    program: Program,
    mesh: Mesh,
    topology: Topology,
    price: float,
    limit: int,
    donated: Sequence[int] = (),
    exchanges: bool = True,
) -> tuple[Program, tuple[Recomputed, ...]]:
    """Makes values again rather than holding them, where that costs less than their price.

    `price` is in seconds for each byte held at the fullest moment; below `limit` bytes no further
    moment is relieved. Donated arguments may be overwritten. With `exchanges`, collectives may be
    done again.

    Returns:
      The program, and what it no longer holds.
    """
    costs = Costs(program, mesh, topology, price, exchanges)
    program, dropped = recompute_in_loops(program, costs)
    program = dedupe(program)
    memory = peak_memory(program, donated, topology.platform)
    for _ in range(ROUNDS):
        path = _path(program.body, memory.order[memory.peak_at]) if memory.order else []
        if memory.peak <= limit or not path:
            break
        relieved, more = recompute_in_block(program, costs.of(program), path)
        relieved = remove_dead(relieved)
        after = peak_memory(relieved, donated, topology.platform)
        if after.peak >= memory.peak:
            break
        program, memory = relieved, after
        dropped += more
    return program, tuple(dropped)


def _path(region: Region, wanted: Op) -> list[Op]:
    """The ops around an op, outermost first, and the op itself."""
    for op in region.ops:
        if op is wanted:
            return [op]
        for inner in op.regions:
            if path := _path(inner, wanted):
                return [op, *path]
    return []
