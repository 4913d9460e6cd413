"""Random local programs give every device the same with all rewrites as without, to the bit."""

import random

import jax
import numpy as np
import pytest

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Program, Value
from spmd.ir.types import TensorType
from spmd.lowering.rewrites.schedule import Room, schedule
from spmd.lowering.rewrites.simplify import simplify
from spmd.lowering.rewrites.slices import slice_collectives
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology
from tests.lowering.rewrites.local_programs import arguments, run

MESHES = (
    Mesh(None, (4, 2), ("data", "model")),
    Mesh(None, (2, 2, 2), ("a", "b", "c")),
    Mesh(None, (8,), ("data",), (2,)),
    Mesh(None, (2, 4), ("host", "data"), (2, 1)),
)
TOPOLOGIES = ("cpu:8", "h200:8", "v5e:2x4")
SHAPES = ((8, 16), (16, 8), (8, 8), (4, 4, 8))
MOST_ELEMENTS = 8192

KINDS = {
    "gather": 3, "sum": 3, "scatter": 2, "slice": 5, "swap": 1, "permute": 1,
    "transpose": 1, "reshape": 1, "convert": 2, "negate": 1, "combine": 4,
}  # fmt: skip
"""What an op may be, and how often."""


class _Maker:
    """Makes one program, an op at a time.

    Attributes:
      same: for each value, the atoms along which all devices have the same of it. Only along those
        may it be sliced.
    """

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.mesh = self.r.choice(MESHES)
        self.b = Builder()
        self.same: dict[Value, frozenset[int]] = {}
        self.values: list[Value] = []
        self.last: Axes = ()

    def program(self) -> Program:
        r, b = self.r, self.b
        b.begin(True)
        for _ in range(r.randint(1, 2)):
            self.keep(b.value(TensorType(r.choice(SHAPES), "f32")), frozenset())
        args = tuple(self.values)
        for _ in range(r.randint(5, 16)):
            x = self.values[-1] if r.random() < 0.6 else r.choice(self.values)
            getattr(self, r.choices(list(KINDS), list(KINDS.values()))[0])(x)
        made = self.values[len(args) :] or self.values
        outs = dict.fromkeys([made[-1], *r.sample(made, min(len(made), r.randint(0, 2)))])
        body = b.end(args, list(outs))
        arg_names = tuple(f"a{i}" for i in range(len(args)))
        result_names = tuple(f"r{i}" for i in range(len(outs)))
        return Program("random", tuple(b.types), body, arg_names, result_names)

    def keep(self, value: Value, same: frozenset[int]) -> None:
        self.values.append(value)
        self.same[value] = same

    def atoms(self) -> Axes:
        """Some atoms, often those of the last exchange, as far as that goes."""
        r, everything = self.r, range(len(self.mesh.atoms))
        if not self.last or r.random() < 0.3:
            return tuple(r.sample(everything, r.randint(1, len(everything))))
        axes = list(self.last)
        if r.random() < 0.3:
            r.shuffle(axes)
        if r.random() < 0.3:
            axes = axes[: r.randint(1, len(axes))]
        if r.random() < 0.2:
            axes += [a for a in everything if a not in axes][:1]
        return tuple(axes)

    def dim(self, x: Value) -> int:
        return self.r.randrange(self.b.types[x].rank)

    def exchange(self, kind: str, x: Value, axes: Axes, out: TensorType, **attrs: object) -> None:
        made = self.b.collective(kind, x, out, axes, **attrs)
        same = self.same[x]
        gives_all = kind in ("all_gather", "all_reduce")
        self.last = axes
        self.keep(made, same | set(axes) if gives_all else same - set(axes))

    def gather(self, x: Value) -> None:
        axes, dim, type_ = self.atoms(), self.dim(x), self.b.types[x]
        parts = self.mesh.extent(axes)
        if type_.size * parts <= MOST_ELEMENTS:
            self.exchange("all_gather", x, axes, type_.scaled(dim, parts), all_gather_dim=dim)

    def sum(self, x: Value) -> None:
        type_ = self.b.types[x]
        body = reducer_body(self.r.choice(["add", "add", "max"]), type_.dtype)
        self.exchange("all_reduce", x, self.atoms(), type_, body=body)

    def scatter(self, x: Value) -> None:
        axes, dim, type_ = self.atoms(), self.dim(x), self.b.types[x]
        parts = self.mesh.extent(axes)
        if type_.shape[dim] % parts == 0:
            out, body = type_.scaled(dim, 1, parts), reducer_body("add", type_.dtype)
            self.exchange("reduce_scatter", x, axes, out, scatter_dimension=dim, body=body)

    def slice(self, x: Value) -> None:
        axes, dim, type_ = self.atoms(), self.dim(x), self.b.types[x]
        parts = self.mesh.extent(axes)
        if type_.shape[dim] % parts == 0 and self.same[x].issuperset(axes):
            attrs = {"axes": axes, "dim": dim}
            (made,) = self.b.op("spmd.local_slice", (x,), (type_.scaled(dim, 1, parts),), attrs)
            self.keep(made, self.same[x] - set(axes))

    def swap(self, x: Value) -> None:
        axes, joined, split, type_ = self.atoms(), self.dim(x), self.dim(x), self.b.types[x]
        parts = self.mesh.extent(axes)
        if joined != split and type_.shape[split] % parts == 0:
            out = type_.scaled(joined, parts).scaled(split, 1, parts)
            dims = {"concat_dimension": joined, "split_dimension": split}
            self.exchange("all_to_all", x, axes, out, **dims)

    def permute(self, x: Value) -> None:
        axes = self.atoms()
        pairs: list[tuple[int, int]] = []
        for group in self.mesh.groups(axes):
            pairs += zip(group, self.r.sample(group, len(group)), strict=True)
        some = tuple(sorted(pairs)[: self.r.randint(1, len(pairs))])
        self.exchange("collective_permute", x, axes, self.b.types[x], pairs=some)

    def transpose(self, x: Value) -> None:
        rank = self.b.types[x].rank
        self.keep(self.b.transpose(x, self.r.sample(range(rank), rank)), self.same[x])

    def reshape(self, x: Value) -> None:
        type_, dim = self.b.types[x], self.dim(x)
        shape = type_.shape
        shapes = [(type_.size,), (1, *shape), (shape[0] * shape[-1], *shape[1:-1])]
        if shape[dim] % 2 == 0:
            for halves in ((2, shape[dim] // 2), (shape[dim] // 2, 2)):
                shapes.append((*shape[:dim], *halves, *shape[dim + 1 :]))
        new = self.r.choice([s for s in shapes if len(s) <= 4 and np.prod(s) == type_.size])
        self.keep(self.b.reshape(x, new), self.same[x])

    def convert(self, x: Value) -> None:
        self.keep(self.b.convert(x, self.r.choice(["f32", "bf16", "i32"])), self.same[x])

    def negate(self, x: Value) -> None:
        self.keep(self.b.unary("negate", x), self.same[x])

    def combine(self, x: Value) -> None:
        other = self.r.choice([v for v in self.values if self.b.types[v] == self.b.types[x]])
        name = self.r.choice(["add", "subtract", "maximum", "minimum"])
        self.keep(self.b.binary(name, x, other), self.same[x] & self.same[other])


@pytest.mark.parametrize("seed", range(24))
def test_rewrites_change_nothing(seed: int) -> None:
    maker = _Maker(seed)
    program, mesh, r = maker.program(), maker.mesh, maker.r
    topology = Topology(r.choice(TOPOLOGIES))
    combine, prefetch = r.choice([0, 2048, 4 << 20]), r.choice([0, 1, 4])
    room = Room(1 << 40)
    simple = slice_collectives(simplify(program, topology.platform), mesh)
    rewritten = schedule(simple, mesh, topology, combine, prefetch, room)
    # Ones only, so that sums are exact in any order, even in bfloat16.
    args = [np.clip(a, -1, 1) for a in arguments(program, mesh)]
    found = (run(each, mesh, args) for each in (program, rewritten))
    jax.tree.map(np.testing.assert_array_equal, *found)
