"""A training step of a Llama for a slice that is not here: what becomes of it, by us and `jax.jit`.

Nothing runs. Time and memory are predicted, and what XLA allocates is said where the machine's
compiler is here (`tpu` extra). `jax.jit` gets the same function, marks and donation; the
optimizer's moments lie as their parameters.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from benchmarks.hlo.modelled import modelled
from spmd.cli.flags import Parser, Switch, words
from spmd.errors import SpmdError
from spmd.explain.memory import Memory
from spmd.lowering.ahead import devices_ahead
from spmd.mesh.spec import jax_mesh
from spmd.models.llama import sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import named_config
from spmd.models.llama.step import Step, argument_types, train_step


class Built(NamedTuple):
    """What became of a program; None where nothing says so."""

    # seconds, waiting, peak: as predicted
    seconds: float | None = None
    waiting: float | None = None
    peak: int | None = None
    sent: int | None = None  # bytes that one device sends in a step
    kernels: float | None = None  # seconds by the cycles that the machine's compiler estimates
    # what collectives take beside these in its schedule, by our figures of the links
    exposed: float | None = None
    alive: int | None = None  # the most bytes that are alive at once in that schedule
    allocated: int | None = None  # bytes on one device, as that compiler lays them
    temporary: int | None = None  # of these, bytes of values in between
    compiling: float | None = None  # seconds
    text: str = ""  # the compiler's HLO


class Case(NamedTuple):
    """A training step on a mesh of a slice."""

    config: LlamaConfig  # the model
    mesh: spmd.Mesh  # with devices or without
    machine: spmd.Topology | None  # the slice; None: the devices of the mesh
    shape: tuple[int, int]  # sequences in a batch, and tokens in each
    table: sharding.SpecTable = sharding.TWO_D
    optimizer: optax.GradientTransformation = optax.adamw(1e-4)
    options: spmd.Options = spmd.Options()

    @property
    def topology(self) -> spmd.Topology:
        """The slice that is not here."""
        assert self.machine is not None
        return self.machine

    @property
    def has_compiler(self) -> bool:
        """Whether its machine's compiler can run here."""
        return self.topology.platform == "tpu"

    def step(self) -> Step:
        """The step, with the usual marks of activations."""
        marks = sharding.activation_marks(self.mesh, self.config, self.table)
        return train_step(self.config, self.optimizer, marks)

    def types(self) -> tuple[Any, Any, Any]:
        """The types of its arguments: parameters and batch are marked."""
        return argument_types(self.config, self.optimizer, self.mesh, self.shape, self.table)

    def lower(self) -> spmd.Lowered:
        """Plans the step."""
        jitted = spmd.jit(self.step(), mesh=self.mesh, donate_argnums=(0, 1), options=self.options)
        return jitted.lower(*self.types(), topology=self.machine)


def mesh_of(axes: Mapping[str, int]) -> spmd.Mesh:
    """A mesh without devices."""
    return spmd.Mesh(None, tuple(axes.values()), tuple(axes))


def parse_axes(text: str) -> dict[str, int]:
    """`data=4:model=2` as sizes of axes."""
    return {name: int(size) for name, size in (part.split("=") for part in text.split(":"))}


def model_of(name: str, layers: int = 0, **fields: Any) -> LlamaConfig:
    """A named model with other fields, and so many layers, or all of its own."""
    config = dataclasses.replace(named_config(name), **fields)
    return dataclasses.replace(config, num_hidden_layers=layers or config.num_hidden_layers)


class Row(NamedTuple):
    """A model on a slice: a row of a table."""

    model: str  # named config
    topology: str  # the slice
    axes: Mapping[str, int]  # sizes of the mesh's axes
    batch: int = 1  # sequences in a step

    def case(self, given: Any, sharding_name: str = "2d", **fields: Any) -> Case:
        """Its training step in bf16, with the layers and sizes that flags ask for."""
        config = model_of(self.model, given.layers, dtype="bfloat16", **fields)
        shape = (given.batch or self.batch, given.seq_len)
        topology, table = spmd.Topology(self.topology), sharding.table_named(sharding_name)
        return Case(config, mesh_of(self.axes), topology, shape, table)


def make_parser(
    name: str, about: str | None, rows: Iterable[str], programs: Iterable[str], seq_len: int
) -> Parser:
    """The flags of a benchmark with a line for each program of each row."""
    parser = Parser(f"benchmarks/run {name}", about)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(rows), help="which configurations")
    add("--programs", type=words, default=",".join(programs), help="what is made of the step")
    add("--layers", type=int, default=0, help="so many layers instead of all")
    add("--batch", type=int, default=0, help="so many sequences instead of the row's")
    add("--seq_len", type=int, default=seq_len, help="tokens in a sequence")
    add("--compile", action=Switch, default=True, help="run the TPU compiler")
    return parser


@functools.cache
def mesh_ahead(mesh: spmd.Mesh, topology: spmd.Topology) -> jax.sharding.Mesh:
    """The mesh on the slice's devices; those of two calls of jax's would not be the same ones."""
    return jax_mesh(mesh, devices_ahead(mesh, topology))


def placed(types: Any, optimizer: Any, mesh: spmd.Mesh, topology: spmd.Topology) -> Any:
    """The arguments on the slice's devices; the optimizer's moments lie as their parameters."""
    where = mesh_ahead(mesh, topology)

    def place(x: Any, like: Any) -> Any:
        spec = [None if entry is spmd.OPEN else entry for entry in like.sharding.spec]
        sharding_ = NamedSharding(where, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_)

    def whole(x: Any) -> Any:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(where, PartitionSpec())
        )

    params, state, batch = types
    return (
        jax.tree.map(place, params, params),
        optax.tree_map_params(optimizer, place, state, params, transform_non_params=whole),
        jax.tree.map(place, batch, batch),
    )


def planned(lowered: spmd.Lowered) -> Built:
    """What a plan says."""
    sent, timeline = sum(c.bytes * c.count for c in lowered.collectives), lowered.timeline
    peak = lowered.predicted_memory.peak
    return Built(timeline.seconds, timeline.exposed_seconds, peak, sent)


def by_spmd(case: Case, compiles: bool = True) -> tuple[Built, spmd.Lowered]:
    """Plans a step, and compiles it where a compiler is."""
    start = time.perf_counter()
    lowered = case.lower()
    built = planned(lowered)
    if compiles and case.has_compiler:
        executable = lowered.compile().executable
        built = with_compiler(built, case.mesh, case.topology, executable, start)
    return built, lowered


def by_jax(case: Case, compiles: bool = True, options: Mapping[str, str] | None = None) -> Built:
    """Compiles a step by `jax.jit`, which says nothing where no compiler is.

    Args:
      options: for the compiler.
    """
    if not (compiles and case.has_compiler):
        return Built()
    start = time.perf_counter()
    there = placed(case.types(), case.optimizer, case.mesh, case.topology)
    where = jax.tree.map(lambda x: x.sharding, there)
    plain = jax.jit(case.step(), donate_argnums=(0, 1), out_shardings=(*where[:2], None))
    executable = plain.lower(*there).compile(compiler_options={**options} if options else None)
    return with_compiler(Built(), case.mesh, case.topology, executable, start)


def with_compiler(
    built: Built, mesh: spmd.Mesh, topology: spmd.Topology, executable: Any, start: float
) -> Built:
    """With the compiler's figures; bytes are the plan's, where there is one."""
    seconds, analysis = time.perf_counter() - start, executable.memory_analysis()
    text = executable.as_text() or ""
    step = modelled(text, mesh, topology)
    return built._replace(
        sent=step.sent if built.sent is None else built.sent,
        kernels=step.kernel_seconds,
        exposed=step.exposed_seconds,
        alive=analysis.peak_memory_in_bytes,
        allocated=Memory.of(analysis).peak_bytes,
        temporary=Memory.of(analysis).temporary,
        compiling=seconds,
        text=text,
    )


def kept(path: Path | None, make: Callable[[], Built]) -> Built:
    """What a file says was made last time; without the file it is made, and written down."""
    if path is not None and path.exists():
        return Built(**json.loads(path.read_text(encoding="utf-8")))
    built = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(built._asdict()), encoding="utf-8")
    return built


class Column(NamedTuple):
    """A column of the table: a field of `Built`, in which unit, with how many digits."""

    field: str
    unit: float = 1
    digits: int = 2


COLUMNS: Mapping[str, Column] = {
    "predicted s": Column("seconds"),
    "of that waiting": Column("waiting"),
    "GB sent": Column("sent", 1e9, 1),
    "predicted GiB": Column("peak", 2**30, 1),
    "kernels s": Column("kernels"),
    "waiting in its schedule": Column("exposed"),
    "alive GiB": Column("alive", 2**30, 1),
    "compiler GiB": Column("allocated", 2**30, 1),
    "compile s": Column("compiling", digits=0),
}


def cells(built: Built, columns: Mapping[str, Column] = COLUMNS) -> Iterator[str]:
    """A line of the table."""
    for field, unit, digits in columns.values():
        yield cell(getattr(built, field), unit, digits)


def cell(number: float | None, unit: float, digits: int) -> str:
    """A number in a unit; a dash where nothing says it."""
    return "-" if number is None else f"{number / unit:.{digits}f}"


def attempt(build: Callable[[], Any], otherwise: Any) -> tuple[Any, str]:
    """What became of a program, or what to say and why nothing did."""
    try:
        return build(), ""
    except (SpmdError, jax.errors.JaxRuntimeError) as error:
        return otherwise, str(error).strip().splitlines()[0][:200]
