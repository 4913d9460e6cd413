"""A training step of a Llama for a slice that is not here: what becomes of it, by us and `jax.jit`.

Nothing runs. Time and memory are predicted, and what XLA allocates is said where the machine's
compiler is here (`tpu` extra). `jax.jit` gets the same function, marks and donation; the
optimizer's moments lie as their parameters.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

import spmd
from benchmarks.hlo.modelled import modelled
from benchmarks.tpu import placed
from spmd.errors import SpmdError
from spmd.explain.memory import Memory
from spmd.models.llama import sharding
from spmd.models.llama.config import LlamaConfig
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
    compiling: float | None = None  # seconds
    text: str = ""  # the compiler's HLO


class Case(NamedTuple):
    """A training step on a mesh of a slice."""

    config: LlamaConfig  # the model
    mesh: spmd.Mesh  # without devices
    topology: spmd.Topology  # the slice
    shape: tuple[int, int]  # sequences in a batch, and tokens in each
    table: sharding.SpecTable = sharding.TWO_D

    @property
    def has_compiler(self) -> bool:
        """Whether its machine's compiler can run here."""
        return self.topology.platform == "tpu"

    def program(self) -> tuple[Step, Any, optax.GradientTransformation]:
        """The step, the types of its arguments, and the optimizer."""
        optimizer = optax.adamw(1e-4)
        marks = sharding.activation_marks(self.mesh, self.config, self.table)
        types = argument_types(self.config, optimizer, self.mesh, self.shape, self.table)
        return train_step(self.config, optimizer, marks), types, optimizer


def mesh_of(axes: Mapping[str, int]) -> spmd.Mesh:
    """A mesh without devices."""
    return spmd.Mesh(None, tuple(axes.values()), tuple(axes))


def by_spmd(case: Case, compiles: bool = True) -> tuple[Built, spmd.Lowered]:
    """Plans a step, and compiles it where a compiler is."""
    start = time.perf_counter()
    step, types, _ = case.program()
    jitted = spmd.jit(step, mesh=case.mesh, donate_argnums=(0, 1))
    lowered = jitted.lower(*types, topology=case.topology)
    sent = sum(c.bytes * c.count for c in lowered.collectives)
    timeline = lowered.timeline
    built = Built(timeline.seconds, timeline.exposed_seconds, lowered.predicted_memory.peak, sent)
    if compiles and case.has_compiler:
        executable = lowered.compile().executable
        built = with_compiler(built, case.mesh, case.topology, executable, start)
    return built, lowered


def by_jax(case: Case, compiles: bool = True) -> Built:
    """Compiles a step by `jax.jit`, which says nothing where no compiler is."""
    if not (compiles and case.has_compiler):
        return Built()
    start = time.perf_counter()
    step, types, optimizer = case.program()
    there = placed(types, optimizer, case.mesh, case.topology)
    where = jax.tree.map(lambda x: x.sharding, there)
    plain = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*where[:2], None))
    executable = plain.lower(*there).compile()
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
        compiling=seconds,
        text=text,
    )


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


def print_head(heads: Sequence[str]) -> None:
    """The first two lines of a table."""
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))


def print_line(line: Sequence[str], problem: str = "") -> None:
    """One more line, and below it why it is empty."""
    print("| " + " | ".join(line) + " |", flush=True)
    if problem:
        print(f"    {problem}", flush=True)
