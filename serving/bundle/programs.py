"""A bundle's functions as programs of a mesh: planned one after the other, compiled in parallel.

The primary function is planned first, from the specs of the manifest. What its plan makes of the
weights and the state is given to all others.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd.api import Lowered, lower_stablehlo
from spmd.auto import auto_specs
from spmd.errors import SpmdError
from spmd.frontend.refine import is_dynamic, refine
from spmd.lowering.emit import Emitted
from spmd.lowering.execute import compile_emitted, x64_if
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import jax_mesh, platform_of
from spmd.models.gpu_options import gpu_options
from spmd.options import Options
from spmd.serving.bundle.function import BundleError, one_line
from spmd.serving.bundle.manifest import (
    AUTO,
    Entrypoint,
    Filled,
    LeafEntry,
    Manifest,
    Sizes,
    Variant,
)
from spmd.serving.bundle.placement import spec_for
from spmd.store import NOWHERE

Spec = Sequence[Any] | None
"""One entry for each dim, as `spmd.mark_sharding` takes it; None is left open as a whole."""

Say = Callable[[str], None]
"""Tells people what goes on."""

Placed = Mapping[str, NamedSharding]
"""Path of every weight and state leaf -> where it lies."""

UNLIMITED = 1 << 62  # bytes


class FunctionKey(NamedTuple):
    """What decides, besides its module, what becomes of a function."""

    # arguments, results: a spec for each
    arguments: tuple[Spec, ...]
    results: tuple[Spec, ...]
    updates: tuple[tuple[int, int], ...]  # (result, argument) of every leaf of the state
    symbols: tuple[tuple[str, int], ...] = ()  # (name, value) of every symbol of the bundle
    auto: bool = False  # whether specs are chosen for arguments that have none
    fills: bool = False  # it is the fastest plan, as a symbol takes what memory that leaves


Lower = Callable[[Entrypoint, FunctionKey], Emitted]
"""Lowers a function, wherever its module comes from."""

PlanMore = Callable[[str], Emitted]
"""Plans a function, by name, behind others whose weights and state it takes as they lie."""

_LOG = logging.getLogger("serving")


@dataclasses.dataclass(frozen=True)
class CompiledFunction:
    """A function, compiled."""

    entry: Entrypoint  # what the manifest says of it
    emitted: Emitted  # what is compiled
    executable: Any  # takes and returns flat arrays
    arguments: tuple[NamedSharding, ...]  # their shardings


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a bundle has on a mesh."""

    programs: Mapping[str, CompiledFunction]  # name -> program
    # name -> plans and compiles it; of those that are not among `programs`
    later: Mapping[str, Callable[[], CompiledFunction]]
    weights: Mapping[str, jax.Array]  # path -> array
    make_state: Any  # a program that makes the state; None where there is none


def plan_functions(
    manifest: Manifest,
    names: Sequence[str],
    mesh: Mesh,
    lower: Lower,
    say: Say,
    symbols: Mapping[str, Sizes],
    fills: bool = False,
) -> tuple[dict[str, Emitted], list[str], PlanMore]:
    """Functions, planned and partitioned in this order: see `with_primary`.

    Args:
      manifest: `Manifest.sized`.
      names: of the functions, variants where there are some.
      say: is told which one it is.
      fills: as in `FunctionKey`, of all plans.

    Returns:
      Name -> emitted program; a sentence on each part of a spec that does not fit the mesh; and
      what plans another function behind these, on any thread.

    Raises:
      BundleError: a spec that does not fit a leaf, or what `lower` raises.
    """
    known = {name: value for name, value in symbols.items() if isinstance(value, int)}
    planner = _Planner(manifest, mesh, lower, known, fills)
    emitted = {}
    for number, name in enumerate(names, start=1):
        say(f"planning {name} ({number} of {len(names)})")
        emitted[name] = planner.plan(manifest.functions[name])
    notes = list(dict.fromkeys(planner.notes))
    planning = threading.Lock()

    def more(name: str) -> Emitted:
        with planning:  # it is Python: several at a time would only keep one another waiting
            planner.notes.clear()
            program = planner.plan(manifest.functions[name])
            for note in planner.notes:
                if note not in notes:
                    _LOG.warning("note: %s", note)
            return program

    return emitted, notes, more


def with_primary(manifest: Manifest, wanted: Iterable[str]) -> list[str]:
    """Functions in the order in which they are planned.

    Args:
      manifest: as it was written, or `Manifest.sized`.
      wanted: names of the functions, as they were written.
    """
    variants = [entry.name for name in wanted for entry in manifest.variants(name)]
    return list(dict.fromkeys([manifest.primary, *variants]))


def with_all_leaves(manifest: Manifest, soon: Collection[str], wanted: Sequence[str]) -> list[str]:
    """Functions that are planned before weights are read: `soon`, and others with own leaves.

    Where a weight or a leaf of the state lies is up to the first function that takes it.
    """

    def leaves(name: str) -> set[str]:
        return {leaf.path for leaf in manifest.functions[name].owned}

    found = [name for name in wanted if name in soon]
    known = leaves(manifest.primary).union(*map(leaves, found))
    for name in wanted:
        if not leaves(name) <= known:
            found.append(name)
            known |= leaves(name)
    return found


def heaviest(manifest: Manifest, wanted: Collection[str]) -> list[str]:
    """Of some functions the one whose inputs and results are the largest, by their known dims.

    Those that take weights come before those that take none: they compute more with theirs.
    """

    def size(name: str) -> tuple[bool, int]:
        entry = manifest.functions[name]
        shapes = [leaf.shape for leaf in (*entry.inputs, *entry.outputs)]
        sizes = [math.prod(dim for dim in shape if isinstance(dim, int)) for shape in shapes]
        return bool(entry.leaves("weights")), sum(sizes)

    return [max(wanted, key=size)] if wanted else []


def emitted_of(module: Any, mesh: Mesh, asked: FunctionKey, options: Options) -> Emitted:
    """A function, lowered.

    Args:
      module: its module, as `static_module` makes it.
      mesh, options: what it is lowered for.
    """
    lowered = lowered_of(module, mesh, asked, options)
    # The functions share weights and state: these lie in one way for all.
    emitted = lowered.stages.emitted.major_to_minor()
    emitted = dataclasses.replace(emitted, seconds=lowered.cost)
    if not asked.symbols:
        return emitted
    return dataclasses.replace(emitted, peak_bytes=lowered.predicted_memory.peak)


def lowered_of(module: Any, mesh: Mesh, asked: FunctionKey, options: Options) -> Lowered:
    """A function's plan; arguments as for `emitted_of`."""
    arguments: Sequence[Spec] = asked.arguments
    if asked.auto:
        arguments = auto_specs(module, mesh, arguments, asked.results, options, asked.updates)
    options = dataclasses.replace(options, cache_dir=NOWHERE)  # a bundle's cache keeps all of it
    if asked.fills:
        options = dataclasses.replace(options, memory_limit=UNLIMITED, recompute=False)
    return lower_stablehlo(module, mesh, arguments, asked.results, options, asked.updates)


def static_module(module: Any, entry: Entrypoint, asked: FunctionKey) -> Any:
    """A function's module at the shapes of `entry`.

    Raises:
      FrontendError: it cannot have them.
    """
    if not is_dynamic(module):
        return module
    return refine(module, [leaf.shape for leaf in entry.leaves()], dict(asked.symbols))


class _Planner:
    """Plans functions one after the other; what the first ones decide holds for the others."""

    def __init__(
        self, manifest: Manifest, mesh: Mesh, lower: Lower, symbols: Mapping[str, int], fills: bool
    ) -> None:
        self.manifest, self.mesh, self.lower, self.symbols = manifest, mesh, lower, symbols
        self.fills = fills
        self.auto = bool(manifest.contract.get(AUTO))
        self.notes: list[str] = []
        self.decided: dict[str, Spec] = {}

    def plan(self, entry: Entrypoint) -> Emitted:
        leaves, state = entry.leaves(), set(entry.leaves("state"))
        # The leaves of the state come first among the results.
        updates = tuple(enumerate(i for i, leaf in enumerate(leaves) if leaf in state))
        arguments = tuple(self.spec(leaf) for leaf in leaves)
        results = (*(None for _ in updates), *map(self.output, entry.outputs))
        sizes = entry.sizes if isinstance(entry, Variant) else {}
        symbols = tuple(sorted({**self.symbols, **sizes}.items()))
        asked = FunctionKey(arguments, results, updates, symbols, self.auto, self.fills)
        emitted = self.lower(entry, asked)
        owned = {leaf.path for leaf in entry.owned}
        for leaf, spec in zip(leaves, emitted.specs(emitted.arguments), strict=True):
            if leaf.path in owned:
                self.decided.setdefault(leaf.path, tuple(spec))
        return emitted

    def spec(self, leaf: LeafEntry) -> Spec:
        if leaf.path in self.decided:
            return self.decided[leaf.path]
        found = spec_for(leaf, self.manifest.specs, self.mesh)
        if found is None:
            return None
        self.notes += found.notes
        return found.spec

    def output(self, leaf: LeafEntry) -> Spec:
        """How a result lies: as the specs of `outputs/` say, else open."""
        if jax.process_count() > 1:
            return ()  # each process reads all of it
        return self.spec(dataclasses.replace(leaf, path=f"outputs/{leaf.path}"))


# Compiling


def compile_functions(
    manifest: Manifest,
    mesh: Mesh,
    emitted: Mapping[str, Emitted],
    more: PlanMore,
    wanted: Sequence[str],
    options: Options,
    read_weights: Callable[[Placed], Mapping[str, jax.Array]],
    waiting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Parts:
    """Compiles planned functions, while the weights are read onto the mesh.

    Args:
      emitted: every planned function.
      more: plans another one.
      wanted: names of those to compile; what is not planned yet is left for later.
      read_weights: path -> array of all weights, where they are to lie.
      waiting: is entered once they are read, and left when all is compiled.

    Raises:
      BundleError: a function that XLA refuses.
    """
    placed = placements(manifest, emitted, mesh)

    def job(name: str) -> CompiledFunction:
        try:
            program = emitted[name] if name in emitted else more(name)
        except SpmdError as error:  # with other processes, or their programs
            raise BundleError(f"function {name} cannot be planned: {one_line(error)}") from error
        return _compile(manifest.functions[name], program, options)

    later = {name: functools.partial(job, name) for name in wanted if name not in emitted}
    with concurrent.futures.ThreadPoolExecutor(threads()) as pool:
        compiling = {name: pool.submit(job, name) for name in wanted if name in emitted}
        needs_x64 = any(program.needs_x64 for program in emitted.values())
        filling = pool.submit(_compile_state, manifest.state, placed, needs_x64)
        weights = read_weights(placed)
        with waiting():
            programs = {name: future.result() for name, future in compiling.items()}
            return Parts(programs, later, weights, filling.result())


def threads() -> int:
    """How many functions are compiled at a time; processes of one job do it in one order."""
    return 1 if jax.process_count() > 1 else max(2, min(8, os.cpu_count() or 1))


def _compile(entry: Entrypoint, emitted: Emitted, options: Options) -> CompiledFunction:
    try:
        rows, platform = int(entry.tags.get("rows", 0)), platform_of(emitted.mesh)
        executable = compile_emitted(emitted, gpu_options(options.compiler_options, platform, rows))
    except (RuntimeError, SpmdError) as error:
        raise BundleError(f"function {entry.name} cannot be compiled: {one_line(error)}") from error
    mesh = jax_mesh(emitted.mesh)
    arguments = tuple(NamedSharding(mesh, spec) for spec in emitted.specs(emitted.arguments))
    return CompiledFunction(entry, emitted, executable, arguments)


def placements(manifest: Manifest, emitted: Mapping[str, Emitted], mesh: Mesh) -> Placed:
    """Where weights and state lie; what no function takes is not split."""
    where = jax_mesh(mesh.refined())
    placed = {
        leaf.path: NamedSharding(where, PartitionSpec())
        for leaf in (*manifest.weights, *manifest.state)
    }
    for name, program in emitted.items():
        leaves = manifest.functions[name].leaves()
        for leaf, spec in zip(leaves, program.specs(program.arguments), strict=True):
            if leaf.path in placed:
                placed[leaf.path] = NamedSharding(where, spec)
    return placed


def nothing_split(manifest: Manifest, emitted: Mapping[str, Emitted], mesh: Mesh) -> list[str]:
    """A sentence, where nobody said how arrays are split, and every device has all of them."""
    if mesh.size == 1 or manifest.specs:
        return []
    leaves = {name: manifest.functions[name].leaves() for name in emitted}
    specs = [
        (leaf.path, spec)
        for name, program in emitted.items()
        for leaf, spec in zip(leaves[name], program.specs(program.arguments), strict=True)
    ]
    weights = {leaf.path for leaf in manifest.weights}
    if any(any(spec) for path, spec in specs if path in weights):
        return []
    if not any(any(spec) for _, spec in specs):
        what = f"nothing is split: each of the {mesh.size} devices computes everything"
    elif weights:
        what = f"no weight is split: each of the {mesh.size} devices holds all of them"
    else:
        return []
    is_auto = manifest.contract.get(AUTO)
    why = "the compiler chose so" if is_auto else "--auto lets the compiler choose some"
    return [f"{what} (the bundle has no specs; {why})"]


def _compile_state(leaves: Sequence[Filled], placed: Placed, needs_x64: bool) -> Any:
    """A program that makes the state, each shard where it belongs; None where there is none."""
    if not leaves:
        return None

    def make() -> tuple[jax.Array, ...]:
        return tuple(jnp.full(leaf.shape, leaf.fill, leaf.dtype) for leaf in leaves)

    shardings = tuple(placed[leaf.path] for leaf in leaves)
    with x64_if(needs_x64):
        return jax.jit(make, out_shardings=shardings).lower().compile()
