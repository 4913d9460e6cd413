"""Compiles a program with our partitioner and with XLA's, and reads what both of them move.

XLA compiles the same function twice: with open arguments left to it (`alone`), and with every
argument placed as our plan places it (`given`). The latter is the harder peer: it need not find
out how to split the optimizer state.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from benchmarks.hlo.arithmetic import matmul_flops
from benchmarks.hlo.collectives import hlo_collectives
from benchmarks.programs.conditions import forget
from benchmarks.programs.program import Built, Program
from spmd.errors import ArgumentError
from spmd.explain.memory import Memory
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import jax_mesh, partition_spec


class Moved(NamedTuple):
    """What one device does in one run of a compiled program."""

    # bytes that it sends, an all-reduce of which only slices are used counting as a reduce-scatter,
    # which it becomes on GPU and TPU
    bytes: int
    collectives: int  # how many collectives run, those in loops once for each trip
    kinds: Mapping[str, int]  # bytes by kind of collective
    temporary: int  # bytes of intermediate values alive at once, by XLA's buffer assignment
    # of its matrix products and convolutions: fewer bytes may be bought by computing the same on
    # several devices
    flops: int
    seconds: float  # XLA's compilation


class Row(NamedTuple):
    """One program."""

    name: str  # of the program
    # spmd, alone, given: ours, XLA's left alone, XLA's given our argument shardings; None where
    # compilation failed
    spmd: Moved | None = None
    alone: Moved | None = None
    given: Moved | None = None
    predicted: int | None = None  # bytes that our plan says it moves
    # seconds that our plan took to make, with nothing remembered of other programs
    planning: float | None = None
    # how many of our collectives name a source line and a reason, and of how many
    explained: tuple[int, int] = (0, 0)
    errors: Mapping[str, str] = {}  # what failed -> the first line of why
    stages: float = 0.0  # seconds that all of our stages took, planning among them

    @property
    def family(self) -> str:
        """As in `Program.family`."""
        return self.name.partition("/")[0]

    @property
    def ratio(self) -> float | None:
        """Our bytes over those of XLA given our shardings; 1 where neither moves anything."""
        if self.spmd is None or self.given is None:
            return None
        if self.spmd.bytes == self.given.bytes:
            return 1.0
        return self.spmd.bytes / self.given.bytes if self.given.bytes else float("inf")


def measure(program: Program, options: spmd.Options, *, guess_trips: bool = False) -> Row:
    """Compiles a program three times and reads the results; failures go into the row.

    Args:
      guess_trips: whether loops whose trips XLA does not state may communicate.
    """
    errors: dict[str, str] = {}

    def attempt(what: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:  # whatever a compiler raises is a result of the benchmark
            errors[what] = first_line(error)
            return None

    def ours() -> tuple[Moved, spmd.Lowered, tuple[int, int]]:
        forget()
        lowered = jitted.lower(*built.args)
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        moved = read(compiled.as_text("hlo"), compiled.memory, seconds, guess_trips)
        named = sum(bool(c.source and c.reason) for c in compiled.collectives)
        explained = (named, len(compiled.collectives))
        return moved, lowered, explained

    mesh, built = program.make()
    jitted = spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate, options=options)
    alone = attempt("alone", lambda: compile_with_xla(built, built.args, guess_trips))
    found = attempt("spmd", ours)
    if found is None:
        return Row(program.name, alone=alone, errors=errors)
    moved, lowered, explained = found
    placed = placed_arguments(lowered, built.args)
    is_open = any(leaf.sharding is None for leaf in jax.tree.leaves(built.args))
    given = (
        attempt("given", lambda: compile_with_xla(built, placed, guess_trips)) if is_open else alone
    )
    predicted = sum(c.bytes * c.count for c in lowered.collectives)
    seconds = lowered.stages.seconds
    stages = sum(seconds.values())
    return Row(
        program.name, moved, alone, given, predicted, seconds["plan"], explained, errors, stages
    )


def placed_arguments(lowered: spmd.Lowered, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, each with the sharding that our plan gives it."""
    mesh = jax_mesh(lowered.mesh)

    def place(leaf: Any, sharding: Sharding) -> Any:
        spec = partition_spec(sharding, lowered.mesh)[: leaf.ndim]  # a key's bits have a dim more
        placed = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    leaves, tree = jax.tree.flatten(args)
    shardings = lowered.stages.optimized.arguments
    placed = [place(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)]
    return tuple(jax.tree.unflatten(tree, placed))


def compile_with_xla(built: Built, args: tuple[Any, ...], guess_trips: bool = False) -> Moved:
    """Plain `jax.jit` of the same function; results are placed as XLA likes."""
    with warnings.catch_warnings():
        # XLA cannot always reuse a donated argument: that is its own loss of memory.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = jax.jit(built.fn, donate_argnums=built.donate).lower(*args)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = Memory.of(compiled.memory_analysis())
    return read(str(compiled.as_text()), memory, seconds, guess_trips)


def read(text: str, memory: Memory, seconds: float, guess_trips: bool = False) -> Moved:
    """What an optimized module moves.

    Raises:
      ArgumentError: a loop that communicates has an unknown trip count, and none is guessed.
    """
    found = hlo_collectives(text, guess_trips=guess_trips, scatter_slices=True)
    raw = hlo_collectives(text, guess_trips=guess_trips)
    kinds: Counter[str] = Counter()
    for collective in found:
        kinds[collective.kind] += collective.bytes * collective.count
    count = sum(c.count for c in raw if c.bytes)
    return Moved(kinds.total(), count, dict(kinds), memory.temporary, matmul_flops(text), seconds)


def first_line(error: Exception) -> str:
    """An exception as one short line."""
    text = str(error).strip() or type(error).__name__
    name = "" if isinstance(error, ArgumentError) else f"{type(error).__name__}: "
    return f"{name}{text.splitlines()[0]}"[:160]
