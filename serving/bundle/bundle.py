"""Loading and running a bundle on whatever mesh there is.

    files and hashes -> plans -> executables, in parallel with weights read onto the mesh -> state

No code of the bundle runs, and nothing is written but the cache.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from models.gpu_graphs import with_gpu_graphs
from serving.bundle.cache import Cache
from serving.bundle.compilations import compilations
from serving.bundle.folder import check_hashes, read_manifest
from serving.bundle.function import BundleError, one_line
from serving.bundle.manifest import WEIGHTS, Entrypoint, Filled, Leaf, Manifest
from serving.bundle.programs import Program, compile_functions, compile_threads, plan_functions
from serving.bundle.tensors import check_stored, read_weights
from serving.bundle.trees import fill
from spmd.lowering.execute import x64_if
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import as_mesh, jax_mesh, platform_of
from spmd.options import Options

_LOG = logging.getLogger("serving")


def load_bundle(
    folder: str | Path,
    mesh: Any,
    *,
    options: Options | None = None,
    cache_dir: str | Path | None = None,
    console: Console | None = None,
    verify: bool = True,
    functions: Collection[str] | None = None,
) -> Bundle:
    """Check a bundle, partition its functions for a mesh, and read its weights onto it.

    Args:
      folder: as `write_bundle` made it; every process of a job has to see it.
      mesh: a `spmd.Mesh`, or jax's.
      options: of the compiler.
      cache_dir: where plans and executables are kept for the next start, as
        `serving.bundle.cache.default_cache_dir()`; None keeps nothing.
      console: progress goes here if it is a terminal, else to the log.
      verify: whether to compare every file's SHA-256; sizes are compared in any case.
      functions: names of those to compile; all if left out.

    Returns:
      The bundle, ready to run: nothing is compiled later.

    Raises:
      BundleError: a bundle that is damaged, does not fit together, or cannot be compiled for this
        mesh. Nothing is left behind then.

    Example:
      >>> bundle = load_bundle("llama-bundle", spmd.make_mesh(data=1, model=8))
      >>> bundle.run("decode_t512", control)
    """
    folder, mesh = Path(folder), as_mesh(mesh)
    options = with_gpu_graphs(options or Options(), platform_of(mesh))
    manifest = read_manifest(folder)
    if manifest.weights:
        check_stored(folder / WEIGHTS, manifest.weights)
    wanted = _wanted(manifest, functions)
    if verify:
        size = sum(stored.size for stored in manifest.files.values())
        _tell(console, f"checking {len(manifest.files)} files, {size / 1e9:.2f} GB")
        check_hashes(folder, manifest, console)
    cache = Cache(cache_dir) if cache_dir is not None else None
    caching = cache.executables() if cache else contextlib.nullcontext()
    with _fitting(folder), caching:
        _tell(console, f"planning {len(wanted)} functions for {mesh}")
        with _status(console) as say:
            stages, notes = plan_functions(folder, manifest, wanted, mesh, options, cache, say)
        placed = _placements(manifest, stages, mesh)
        _tell(console, f"compiling {len(wanted)} functions, and reading weights meanwhile")
        with concurrent.futures.ThreadPoolExecutor(compile_threads()) as pool:
            asked = {name: stages[name] for name in wanted}
            compiling = compile_functions(manifest, asked, options, pool)
            filling = pool.submit(_compile_state, manifest.state, placed)
            weights = read_weights(folder / WEIGHTS, manifest.weights, placed, console)
            _tell(console, "the weights are read")
            with _status(console) as say:
                say(f"compiling {len(wanted)} functions")
                programs = {name: future.result() for name, future in compiling.items()}
                make_state = filling.result()
        if cache is not None and cache.problem is not None:
            notes = [
                *notes,
                f"{cache.folder} cannot keep all that was made ({cache.problem}): the next start "
                "takes as long as this one; name another folder as the cache, or make room",
            ]
        return Bundle(manifest, mesh, programs, weights, make_state, notes)


def _wanted(manifest: Manifest, functions: Collection[str] | None) -> list[str]:
    names = list(manifest.functions) if functions is None else list(functions)
    unknown = [name for name in names if name not in manifest.functions]
    if unknown:
        raise BundleError(
            f"there is no function {unknown[0]!r}; there are {', '.join(manifest.functions)}"
        )
    return names


class Bundle:
    """Functions, compiled, with their weights and their state on the mesh. Made by `load_bundle`.

    Attributes:
      manifest: what the bundle says of itself.
      mesh: the mesh.
      functions: name -> what it is: `tags`, and `inputs` and `outputs` with paths, shapes, dtypes.
      notes: sentences on specs that do not fit the mesh, and on a cache that could not be written.
      programs: name -> executable, shardings and the program of one device.
    """

    def __init__(
        self,
        manifest: Manifest,
        mesh: Mesh,
        programs: Mapping[str, Program],
        weights: Mapping[str, jax.Array],
        make_state: Any,
        notes: Sequence[str],
    ) -> None:
        self.manifest = manifest
        self.mesh = mesh
        self.functions: Mapping[str, Entrypoint] = {n: p.entry for n, p in programs.items()}
        self.programs = programs
        self.notes = tuple(notes)
        self._compiled = len(programs) + (make_state is not None)
        self._make_state = make_state
        self._held: dict[str, jax.Array] = dict(weights)
        self._calls = {name: _Call(program) for name, program in programs.items()}
        self._running = threading.Lock()
        self.reset_state()
        self._before = compilations()

    @property
    def compile_total(self) -> int:
        """Programs of the bundle, and what the process has compiled since: hopefully nothing."""
        return self._compiled + compilations() - self._before

    @property
    def devices(self) -> list[jax.Device]:
        """The mesh's devices."""
        return list(jax_mesh(self.mesh).devices.flat)

    @property
    def state(self) -> Mapping[str, jax.Array]:
        """Path -> array of the state as it is now; the next `run` that has a state donates them."""
        return {leaf.path: self._held[leaf.path] for leaf in self.manifest.state}

    @property
    def weights(self) -> Mapping[str, jax.Array]:
        """Path -> array of the weights."""
        return {leaf.path: self._held[leaf.path] for leaf in self.manifest.weights}

    def reset_state(self) -> None:
        """Fill the state as it was at first."""
        if self._make_state is None:
            return
        with self._running:
            for leaf in self.manifest.state:
                self._held.pop(leaf.path, None)  # its memory first
            made = self._make_state()
            self._held |= {leaf.path: x for leaf, x in zip(self.manifest.state, made, strict=True)}

    def run(self, name: str, *inputs: Any) -> Any:
        """Run a function; it reads the weights, and reads and replaces the state.

        Calls from several threads run one after the other. Results come back at once, as arrays
        that are computed in the background.

        Args:
          name: of `functions`.
          inputs: for each argument that is an input, a pytree with the structure it was exported
            with (or any with the same leaves in the same order), of numpy's or jax's arrays or
            Python numbers.

        Returns:
          The outputs, put together as they were: dicts, tuples, and for named tuples
          `serving.bundle.trees.Fields`, of `jax.Array`s.

        Raises:
          BundleError: no such function, or inputs of other shapes or dtypes.
        """
        leaves = self.run_flat(name, jax.tree.leaves(inputs))
        return fill(self.functions[name].tree, leaves)

    def run_flat(self, name: str, inputs: Sequence[Any]) -> list[jax.Array]:
        """Run a function on the leaves of its inputs; returns the leaves of its outputs."""
        call = self._calls.get(name)
        if call is None:
            raise BundleError(f"there is no function {name!r}; there are {', '.join(self._calls)}")
        given = call.placed(inputs)
        with self._running:
            return call.run(self._held, given)


class _Call:
    """How to call a program: which flat arguments are held, and which are given."""

    def __init__(self, program: Program) -> None:
        self.program = program
        entry = program.entry
        self.held: list[str | None] = [
            None if a.role == "input" else leaf.path for a in entry.arguments for leaf in a.leaves
        ]
        self.state = [leaf.path for leaf in entry.leaves("state")]
        self.inputs = entry.inputs
        self.shardings = [
            s for s, path in zip(program.arguments, self.held, strict=True) if path is None
        ]

    def placed(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The inputs on the mesh."""
        if len(leaves) != len(self.inputs):
            names = ", ".join(leaf.path for leaf in self.inputs)
            raise BundleError(
                f"{self.program.entry.name} takes {len(self.inputs)} inputs ({names}), not "
                f"{len(leaves)}"
            )
        arrays = [as_leaf(x, leaf) for x, leaf in zip(leaves, self.inputs, strict=True)]
        with x64_if(self.program.emitted.needs_x64):
            placed: list[jax.Array] = jax.device_put(arrays, self.shardings)
        return placed

    def run(self, held: dict[str, jax.Array], given: Sequence[jax.Array]) -> list[jax.Array]:
        """Run with what is held, and hold the new state; returns the other results."""
        rest = iter(given)
        arrays = [next(rest) if path is None else held[path] for path in self.held]
        try:
            results = self.program.executable(*arrays)
        except RuntimeError as error:
            raise BundleError(
                f"{self.program.entry.name} failed on the devices: {one_line(error)}; the state "
                "may be gone, reset_state() makes it anew"
            ) from error
        count = len(self.state)
        held.update(zip(self.state, results[:count], strict=True))
        return list(results[count:])


def as_leaf(x: Any, leaf: Leaf) -> Any:
    """An input with the leaf's shape and dtype.

    Numbers of the same kind are converted where none changes.

    Raises:
      BundleError: another shape, another kind of numbers, or numbers that do not fit.
    """
    array = x if isinstance(x, jax.Array) else np.asarray(x)
    dtype = np.dtype(leaf.dtype)
    if tuple(array.shape) != leaf.shape:
        raise BundleError(f"{leaf.path} has the shape {list(leaf.shape)}, not {list(array.shape)}")
    if array.dtype == dtype:
        return array
    wanted, found = (_kind(d) for d in (dtype, array.dtype))
    if wanted != found and not (wanted == "float" and found == "int" and array.ndim == 0):
        raise BundleError(f"{leaf.path} is {leaf.dtype}, not {array.dtype.name}")
    converted = np.asarray(array).astype(dtype)
    if wanted == "int" and not np.array_equal(converted, np.asarray(array)):
        raise BundleError(f"{leaf.path} is {leaf.dtype}, which not all of its numbers fit into")
    return converted


def _kind(dtype: Any) -> str:
    if dtype == np.bool_:
        return "bool"
    return "int" if jnp.issubdtype(dtype, jnp.integer) else "float"


def _placements(
    manifest: Manifest, stages: Mapping[str, Any], mesh: Mesh
) -> dict[str, NamedSharding]:
    """Path of every weight and state leaf -> where it lies; what no function takes is not split."""
    where = jax_mesh(mesh.refined())
    placed = {
        leaf.path: NamedSharding(where, PartitionSpec())
        for leaf in (*manifest.weights, *manifest.state)
    }
    for name, stage in stages.items():
        leaves = [leaf for a in manifest.functions[name].arguments for leaf in a.leaves]
        for leaf, spec in zip(leaves, stage.argument_specs, strict=True):
            if leaf.path in placed:
                placed[leaf.path] = NamedSharding(where, spec)
    return placed


def _compile_state(leaves: Sequence[Filled], placed: Mapping[str, NamedSharding]) -> Any:
    """A program that makes the state, each shard where it belongs; None where there is none."""
    if not leaves:
        return None

    def make() -> tuple[jax.Array, ...]:
        return tuple(jnp.full(leaf.shape, leaf.fill, leaf.dtype) for leaf in leaves)

    shardings = tuple(placed[leaf.path] for leaf in leaves)
    with jax.enable_x64(any(np.dtype(leaf.dtype).itemsize == 8 for leaf in leaves)):
        return jax.jit(make, out_shardings=shardings).lower().compile()


@contextlib.contextmanager
def _fitting(folder: Path) -> Iterator[None]:
    """What devices say of their memory, as an error of ours."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise BundleError(f"{folder} cannot be put on the devices: {one_line(error)}") from error


def _tell(console: Console | None, text: str) -> None:
    """Says in the log what goes on, where there is no terminal to see a bar on."""
    if (console is None or not console.is_terminal) and not jax.process_index():
        _LOG.info(text)


@contextlib.contextmanager
def _status(console: Console | None) -> Any:
    """Says what goes on in one line of a terminal, or not at all."""
    if console is None or not console.is_terminal or jax.process_index():
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update
