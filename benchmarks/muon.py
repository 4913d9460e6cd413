"""Muon on a TPU slice that is not here: planned free, with marks by hand, and beside `jax.jit`.

Nothing runs. Time and memory are predicted; kernels, waits and memory of XLA's compiler come from
libtpu (`tpu` extra), minutes for each program. All get the same arguments, marks and donation; the
hints say how stacked matrices lie while they are multiplied.

Example:
    benchmarks/run muon --layers 16 --nocompile
"""

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

if "jax" not in sys.modules:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import NamedSharding

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks.programs import muon
from benchmarks.programs.program import Built as Program
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, words

HINTS: dict[str, Any] = {
    "free": None,
    "by layers": ("data", None, None),
    "by layers over both axes": (("data", "model"), None, None),
    "by columns": (None, None, "data"),
}
PLAIN = "jax.jit"

IN_MS = {
    "predicted ms": ahead.Column("seconds", 1e-3),
    "of that waiting": ahead.Column("waiting", 1e-3),
    "GB sent": ahead.Column("sent", 1e9, 3),
    "predicted GiB": ahead.Column("peak", 2**30),
    "kernels ms": ahead.Column("kernels", 1e-3),
    "waiting in its schedule": ahead.Column("exposed", 1e-3),
    "compiler GiB": ahead.Column("allocated", 2**30),
    "compile s": ahead.Column("compiling", digits=0),
}


def build(given: Any, axes: tuple[int, ...], name: str) -> ahead.Built:
    """Plans a program, and compiles it if that is asked for."""
    mesh, topology = spmd.Mesh(None, axes, ("data", "model")), spmd.Topology(given.topology)
    made = muon.build(mesh, given.layers, HINTS.get(name))
    start = time.perf_counter()
    if name == PLAIN:
        return by_jax(made, mesh, topology) if given.compile else ahead.Built()
    results = muon.SPECS, muon.SPECS, ()
    jitted = spmd.jit(made.fn, mesh=mesh, donate_argnums=made.donate, out_specs=results)
    lowered = jitted.lower(*made.args, topology=topology)
    built = ahead.planned(lowered)
    if not given.compile:
        return built
    return ahead.with_compiler(built, mesh, topology, lowered.compile().executable, start)


def by_jax(made: Program, mesh: spmd.Mesh, topology: spmd.Topology) -> ahead.Built:
    """Compiles it by `jax.jit`."""
    start, where = time.perf_counter(), ahead.mesh_ahead(mesh, topology)

    def place(x: Any) -> Any:
        sharding = NamedSharding(where, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    args = jax.tree.map(place, made.args)
    results = jax.tree.map(lambda x: x.sharding, args[:2])
    plain = jax.jit(made.fn, donate_argnums=made.donate, out_shardings=(*results, None))
    return ahead.with_compiler(ahead.Built(), mesh, topology, plain.lower(*args).compile(), start)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run muon", __doc__)
    add = parser.add_argument
    add("--topology", default="v5e:4x4", help="the slice")
    add("--meshes", type=words, default="4x4,16x1", help="sizes of the axes data and model")
    add("--layers", type=int, default=16, help="how many layers")
    add("--programs", type=words, default=",".join((*HINTS, PLAIN)), help="which ways")
    add("--compile", action=Switch, default=True, help="run the TPU compiler")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, {given.layers} layers, {given.topology}")
    print_head(("mesh", "program", *IN_MS))
    for axes in given.meshes:
        for name in given.programs:
            sizes = tuple(map(int, axes.split("x")))
            built, problem = ahead.attempt(partial(build, given, sizes, name), ahead.Built())
            print_line([axes, name, *ahead.cells(built, IN_MS)], problem)


if __name__ == "__main__":
    main()
