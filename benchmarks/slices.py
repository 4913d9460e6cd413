"""Training steps for slices that are not here: ours beside plain `jax.jit`, as both compile them.

Nothing runs. Time and memory are predicted, and where the machine's compiler is here (`tpu` extra,
minutes for each program) it says what it makes of them: the cycles of its kernels, what collectives
take beside these in its schedule by our prices of links (`benchmarks/hlo/modelled.py`), and memory.
The peer gets the same function, marks, donation and optimizer-state shardings. It runs with its
windowed einsums, which are the default, and without.

Rows of `seq` are one long sequence, split over that axis: `gathered` is our program in which no
keys may go round, `usual` that in the order of the text instead of zigzag. `jax.jit` has no kernel
that knows of a mesh, and takes attention in blocks of queries.

Example:
    benchmarks/run slices --rows v5e-16-scanned,v5p-8 --layers 2
"""

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from benchmarks.compiled_ahead import Case, mesh_of, model_of
from benchmarks.hlo.modelled import Modelled, modelled
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, words
from spmd.errors import SpmdError
from spmd.explain.memory import Memory
from spmd.ir.dialect import rule
from spmd.lowering.ahead import devices_ahead
from spmd.mesh.spec import jax_mesh

PEERS: Mapping[str, Mapping[str, str]] = {
    "jax.jit": {},
    "no-windows": {
        "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
    },
}
"""What is compiled by `jax.jit`, and its compiler options."""


class Row(NamedTuple):
    """A model on a slice."""

    topology: str
    axes: Mapping[str, int]  # sizes of the mesh's axes
    fields: Mapping[str, Any]  # of the model
    model: str = "llama2-7b"
    layers: int = 4  # 0: all of the model's
    shape: tuple[int, int] = (32, 1024)  # sequences in a step, and tokens in each
    programs: Sequence[str] = ("spmd.jit", *PEERS)

    def case(self, given: Any, zigzag: int) -> Case:
        """Its training step in bf16, with the layers that flags ask for."""
        layers = self.layers if given.layers is None else given.layers
        config = model_of(self.model, layers, dtype="bfloat16", zigzag=zigzag, **self.fields)
        return Case(config, mesh_of(self.axes), spmd.Topology(self.topology), self.shape)


def _short(topology: str, data: int, model: int, scan: bool, remat: str = "none") -> Row:
    fields = {"attention": "einsum", "scan_layers": scan, "remat": remat}
    return Row(topology, {"data": data, "model": model}, fields)


def _long(topology: str, **axes: int) -> Row:
    programs = ("spmd.jit", "gathered", "usual", "jax.jit")
    return Row(topology, axes, {"remat": "full"}, "llama3.1-8b", 0, (1, 131_072), programs)


ROWS = {
    "v5e-16-scanned": _short("v5e:4x4", 16, 1, True),
    "v5e-16-unrolled": _short("v5e:4x4", 16, 1, False),
    "v5e-8x2-scanned": _short("v5e:4x4", 8, 2, True, "full"),
    "v5e-4x4-scanned": _short("v5e:4x4", 4, 4, True),
    "v5e-4x4-unrolled": _short("v5e:4x4", 4, 4, False),
    "v4-16-scanned": _short("v4:2x2x4", 16, 1, True),
    "v4-4x4-scanned": _short("v4:2x2x4", 4, 4, True),
    "v5p-16-scanned": _short("v5p:2x2x4", 16, 1, True),
    "v5p-4x4-scanned": _short("v5p:2x2x4", 4, 4, True),
    "v5p-8": _long("v5p:2x2x2", seq=8),
    "v5p-16": _long("v5p:2x2x4", seq=8, model=2),
    "h200-8": _long("h200:8", seq=8),
    "h200-4x2": _long("h200:8", seq=4, model=2),
}


class Built(NamedTuple):
    """What became of a program; None where nothing says so."""

    lowered: spmd.Lowered | None = None  # of ours
    step: Modelled | None = None  # by the compiler's schedule
    memory: Any = None  # as the compiler lays it
    compiling: float | None = None  # seconds


@functools.cache
def mesh_ahead(mesh: spmd.Mesh, topology: spmd.Topology) -> jax.sharding.Mesh:
    """The mesh on the slice's devices; those of two calls of jax's would not be the same ones."""
    return jax_mesh(mesh, devices_ahead(mesh, topology))


def placed(case: Case, machine: spmd.Topology) -> Any:
    """A step's arguments on the slice's devices; the optimizer's moments lie as parameters."""
    where = mesh_ahead(case.mesh, machine)

    def place(x: Any, spec: Sequence[Any] = ()) -> Any:
        entries = [None if entry is spmd.OPEN else entry for entry in spec]
        sharding = NamedSharding(where, PartitionSpec(*entries))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def alike(x: Any, like: Any) -> Any:
        return place(x, like.sharding.spec)

    params, state, batch = case.types()
    return (
        jax.tree.map(alike, params, params),
        optax.tree_map_params(case.optimizer, alike, state, params, transform_non_params=place),
        jax.tree.map(alike, batch, batch),
    )


def build(given: Any, row: Row, program: str) -> Built:
    """Plans a program, and compiles it where a compiler is.

    Raises:
      SpmdError, JaxRuntimeError: it cannot be.
    """
    is_zigzag = "seq" in row.axes and program in ("spmd.jit", "gathered")
    case = row.case(given, row.axes["seq"] if is_zigzag else 1)
    assert case.machine is not None
    compiles = given.compile and case.machine.platform == "tpu"
    start, lowered = time.perf_counter(), None
    if program not in PEERS:
        most = rule.MOST_PIECES
        rule.MOST_PIECES = 1 if program == "gathered" else most
        try:
            lowered = case.lower()
        finally:
            rule.MOST_PIECES = most
    if not compiles:
        return Built(lowered)
    if lowered is not None:
        executable: Any = lowered.compile().executable
    else:
        there = placed(case, case.machine)
        where = jax.tree.map(lambda x: x.sharding, there)
        plain = jax.jit(case.step(), donate_argnums=(0, 1), out_shardings=(*where[:2], None))
        executable = plain.lower(*there).compile(compiler_options=dict(PEERS[program]) or None)
    seconds = time.perf_counter() - start
    step = modelled(executable.as_text() or "", case.mesh, case.machine)
    return Built(lowered, step, executable.memory_analysis(), seconds)


COLUMNS = (
    "predicted s", "of that waiting", "predicted GiB", "GB sent", "kernels s", "waiting s",
    "asynchronous above 1 MB", "alive GiB", "compiler GiB", "temporary GiB", "compile s",
)  # fmt: skip


def cells(built: Built) -> Iterator[str]:
    """A line of the table, as `COLUMNS` has it; dashes where nothing says it."""
    lowered, step, memory, seconds = built
    if lowered is None:
        yield from "---"
    else:
        timeline, peak = lowered.timeline, lowered.predicted_memory.peak
        yield f"{timeline.seconds:.3f}"
        yield f"{timeline.exposed_seconds:.3f}"
        yield f"{peak / 2**30:.1f}"
    if lowered is not None:
        yield f"{sum(c.bytes * c.count for c in lowered.collectives) / 1e9:.2f}"
    else:
        yield f"{step.sent / 1e9:.2f}" if step else "-"
    if step is None:
        yield from "-------"
        return
    yield f"{step.kernel_seconds:.4f}"
    yield f"{step.exposed_seconds:.4f} ({step.exposed_seconds / step.seconds:.1%})"
    yield f"{step.large_hidden} of {step.large}"
    laid = Memory.of(memory)
    for size in (memory.peak_memory_in_bytes, laid.peak_bytes, laid.temporary):
        yield f"{size / 2**30:.2f}"
    yield f"{seconds:.0f}"


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run slices", __doc__)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(ROWS), help="which configurations")
    add("--programs", type=words, help="of spmd.jit, gathered, usual, jax.jit and no-windows")
    add("--layers", type=int, help="so many layers; 0: all of the model's")
    add("--compile", action=Switch, default=True, help="run the TPU compiler")
    add("--synchronous", action=Switch, default=False, help="list large synchronous collectives")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}")
    print_head(("row", "program", *COLUMNS))
    for name in given.rows:
        for program in given.programs or ROWS[name].programs:
            built, problem = Built(), ""
            try:
                built = build(given, ROWS[name], program)
            except (SpmdError, jax.errors.JaxRuntimeError) as error:
                problem = str(error).strip().splitlines()[0][:200]
            print_line([name, program, *cells(built)], problem)
            for c, waited in built.step.synchronous if built.step and given.synchronous else ():
                what = f"{c.count} x {c.kind} among {c.group_size}, {c.bytes / 1e6:.1f} MB each"
                print(f"    {what}, {waited * 1e3:.2f} ms together: {c.op_name} {c.source}")
