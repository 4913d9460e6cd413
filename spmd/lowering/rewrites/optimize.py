"""The rewrites of the local program, in order: each one's result may give the next one more to do.

`simplify` comes first, then recomputation (`spmd.lowering.recompute`), then `schedule`, of the
program as it is and of the one whose sums travel (`ring`): `spmd.trial` takes the faster.
"""

from __future__ import annotations

from spmd.ir.program import Program
from spmd.ir.rewrite import dedupe, remove_dead
from spmd.lowering.rewrites.clock import Clock, Room
from spmd.lowering.rewrites.combine import combine
from spmd.lowering.rewrites.gathers import regather, share_gathers
from spmd.lowering.rewrites.join_ffts import join_ffts
from spmd.lowering.rewrites.narrow import narrow
from spmd.lowering.rewrites.order import order
from spmd.lowering.rewrites.slices import slice_collectives
from spmd.lowering.rewrites.two_level import two_level
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology


def simplify(program: Program, mesh: Mesh, topology: Topology) -> Program:
    """The rewrites that leave less to do: everything is done once, where and as it is cheapest."""
    # `regather` undoes pairs of scatter and gather, which `two_level` makes on purpose, so it comes
    # before.
    # XLA for CPUs lays an FFT of several dims as its readers like it, which it then refuses to run.
    joined = program if topology.platform == "cpu" else join_ffts(program)
    deduped = dedupe(joined)
    program = share_gathers(regather(narrow(deduped)))
    program = program if program is deduped else dedupe(program)
    return remove_dead(slice_collectives(program, mesh))


def schedule(
    program: Program, mesh: Mesh, topology: Topology, combine_bytes: int, prefetch: int, room: Room
) -> Program:
    """The rewrites that say how and when collectives run, which the others must not undo.

    For `combine_bytes` and `prefetch` see `Options`.
    """
    # A flat buffer is split in levels, not each small collective in it. `order` comes last, since
    # every other rewrite changes what there is to be ordered.
    clock = Clock(program, mesh, topology)
    program = combine(program, clock, combine_bytes)
    program = two_level(program, mesh, topology)
    return order(program, clock, prefetch, room)
