"""Local programs written by hand: read, checked and run on the eight devices of the tests."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spmd.ir.legality import check_program
from spmd.ir.program import Program
from spmd.ir.types import numpy_dtype
from spmd.lowering.emit import emit_local
from spmd.lowering.execute import executable
from spmd.lowering.expand import expand
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.topology import Topology
from spmd.reshard.comm import group_size, wire_bytes
from tests.ir.text_parse import parse_program

Rewrite = Callable[[Program], Program]


def names(program: Program) -> list[str]:
    return [op.name.partition(".")[2] for op in program.walk()]


def rewritten(rewrite: Rewrite, text: str, mesh: Mesh) -> Program:
    """What a rewrite makes of a text, which gives every device what it gave it before.

    Elements are small integers, so that sums are the same in any order.
    """
    before = parse_program(text, mesh)
    after = rewrite(before)
    args = arguments(before, mesh)
    jax.tree.map(np.testing.assert_array_equal, run(before, mesh, args), run(after, mesh, args))
    return after


def arguments(program: Program, mesh: Mesh) -> list[np.ndarray[Any, Any]]:
    """For every argument what the devices have, one behind the other along dim 0."""
    made = []
    for i, value in enumerate(program.body.args):
        type_ = program.types[value]
        shape = (mesh.size * type_.shape[0], *type_.shape[1:])
        elements = np.random.RandomState(i).randint(-9, 10, shape)
        made.append(elements.astype(numpy_dtype(type_.dtype)))
    return made


def run(program: Program, mesh: Mesh, args: Sequence[Any]) -> list[Any]:
    """Every result of every device, one device behind the other along dim 0."""
    check_program(program, "optimized")
    fn = executable(emit_local(partitioned(expand(program, mesh), mesh)))
    return [jax.device_get(result) for result in fn(*args)]


def partitioned(program: Program, mesh: Mesh) -> Partitioned:
    """A program all of whose arguments and results are split over all axes along dim 0."""
    everything = tuple(range(len(mesh.atoms)))

    def split(values: Sequence[int]) -> tuple[Sharding, ...]:
        ranks = [program.types[v].rank for v in values]
        return tuple(Sharding((everything, *[()] * (rank - 1))) for rank in ranks)

    body = program.body
    return Partitioned(program, mesh, split(body.args), split(body.results))


def sent(program: Program, mesh: Mesh, topology: Topology | None = None) -> int:
    """Bytes that one device sends; with a topology, only those over its slow links."""
    total = 0
    for op in program.walk():
        axes = op.kind.attrs.get("axes")
        if axes is None or not op.name.startswith("stablehlo."):
            continue
        if topology is not None:
            links = topology.atom_links(mesh)
            if all(links[a] != topology.chip.dcn for a in axes):
                continue
        kind, (before,), (after,) = op.label, op.kind.operands, op.kind.results
        total += wire_bytes(kind, group_size(op.kind.attrs, mesh), before.bytes, after.bytes)
    return total
