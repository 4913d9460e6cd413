"""Functions with their weights and their state on a mesh, to be run.

Those that are not needed first are compiled behind the others, while these run already (`Behind`).
"""

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from spmd.frontend.refine import NO_SYMBOLS
from spmd.lowering.execute import x64_if
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import jax_mesh
from spmd.serving.bundle.function import BundleError, one_line
from spmd.serving.bundle.manifest import Entrypoint, LeafEntry, Manifest
from spmd.serving.bundle.programs import CompiledFunction, Parts, threads
from spmd.serving.bundle.trees import fill


class Behind:
    """Jobs on threads of their own; when the process ends, those that have not begun are dropped.

    Args:
      jobs: name -> what to do; it raises a `BundleError` if it cannot.
      threads: how many at a time.
      ended: called behind the last one.
    """

    def __init__(
        self,
        jobs: Mapping[str, Callable[[], None]],
        threads: int,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._left = len(jobs)
        self._ended = ended
        self._lock = threading.Lock()
        # Not daemons: a thread inside XLA crashes when the interpreter shuts down around it.
        pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="compile")
        self._futures = {name: pool.submit(self._run, job) for name, job in jobs.items()}
        pool.shutdown(wait=False)
        if not jobs:
            ended()

    def wait(self, name: str) -> bool:
        """Waits for a job; returns whether there is such a one.

        Raises:
          BundleError: it failed.
        """
        future = self._futures.get(name)
        if future is None:
            return False
        future.result()
        return True

    def done(self) -> Iterator[str]:
        """The names of jobs, each once it is done.

        Raises:
          BundleError: some failed; all others were given out before.
        """
        names = {future: name for name, future in self._futures.items()}
        for future in concurrent.futures.as_completed(names):
            if future.exception() is None:
                yield names[future]
        for future in names:
            future.result()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            if not threading.main_thread().is_alive():
                raise BundleError("the process ends")
            job()
        finally:
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last:
                self._ended()


# What jax tells of the work of all threads: name -> seconds of each time.
_durations: dict[str, list[float]] = {"xla": [], "cache": []}
_EVENTS = {
    "/jax/core/compile/backend_compile_duration": "xla",
    "/jax/compilation_cache/cache_retrieval_time_sec": "cache",  # within the former
}


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event in _EVENTS:  # several threads compile: one step, and nothing is lost
        _durations[_EVENTS[event]].append(duration_secs)


_running = threading.Lock()
"""Programs begin one after the other, those of several bundles, too: if two devices took two in
different orders, their collectives would wait for each other."""

jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """Programs that were compiled, or read from jax's cache, since this module was imported."""
    return len(_durations["xla"])


def seconds_of_xla() -> dict[str, float]:
    """Seconds in XLA since this module was imported, added up over threads.

    `xla`: programs were compiled or read; `cache`: the part of it in which they were read;
    `longest`: the program that took the longest.
    """
    sums = {name: sum(found) for name, found in _durations.items()}
    return {**sums, "longest": max(_durations["xla"], default=0.0)}


Told = Callable[[str, Sequence[str], Sequence[Any]], None]
"""Is told of a call: `run`, `reset` or `put`, names of a function or of leaves, and arrays."""


class Bundle:
    """Functions, compiled, with their weights and their state on the mesh.

    `load_bundle` makes it of a folder, `compile_bundle` of functions that are in memory.

    Attributes:
      manifest: what the bundle says of itself.
      symbols: symbol -> value, or values: the sizes of symbolic dims that it was loaded with.
      functions: name -> what it is: `tags`, and `inputs` and `outputs` with paths, shapes, dtypes.
      notes: sentences on specs that do not fit the mesh, and on a cache that could not be written.
      seconds: what loading took, by parts that followed each other.
      programs: name -> executable, shardings and the program of one device, of those functions
        that are compiled by now.
      told: is told of every call before it begins, in the order in which they run, so that other
        processes can repeat them; None where there is nobody to tell.
    """

    def __init__(
        self,
        manifest: Manifest,
        mesh: Mesh,
        parts: Parts,
        notes: Sequence[str],
        symbols: Mapping[str, Any] = NO_SYMBOLS,
    ) -> None:
        programs = parts.programs
        self.manifest = manifest
        self.mesh = mesh
        self.symbols = symbols
        names = [*programs, *parts.later]
        self.functions: Mapping[str, Entrypoint] = {n: manifest.functions[n] for n in names}
        self.programs = dict(programs)
        self.notes = tuple(notes)
        self.seconds: dict[str, float] = {}
        self.told: Told | None = None
        self._compiled = len(programs) + (parts.make_state is not None)
        self._make_state = parts.make_state
        self._held: dict[str, jax.Array] = dict(parts.weights)
        self._calls = {name: _Call(program) for name, program in programs.items()}
        self._behind = Behind({}, 1)
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
        with _running:
            self._tell("reset")
            for leaf in self.manifest.state:
                self._held.pop(leaf.path, None)  # its memory first
            made = self._make_state()
            self._held |= {leaf.path: x for leaf, x in zip(self.manifest.state, made, strict=True)}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing runs meanwhile: calls under way are done first, others wait."""
        with _running:
            jax.block_until_ready(list(self.state.values()))
            yield

    def put_state(self, arrays: Mapping[str, Any]) -> None:
        """Put arrays, by path, in the place of leaves of the state."""
        with _running:
            self._tell("put", list(arrays), list(arrays.values()))
            shardings = [self._held[path].sharding for path in arrays]
            self._held |= zip(arrays, put(list(arrays.values()), shardings), strict=True)

    def compile_behind(
        self, later: Mapping[str, Callable[[], CompiledFunction]], ended: Callable[[], None]
    ) -> None:
        """Compiles the functions that are not there yet, on threads of their own.

        Args:
          later: `Parts.later`.
          ended: called when all are there, or at once.
        """

        def put_in(name: str, compiled: Callable[[], CompiledFunction]) -> None:
            program = compiled()
            self.programs[name] = program
            self._calls[name] = _Call(program)

        jobs = {n: functools.partial(put_in, n, job) for n, job in later.items()}
        self._behind = Behind(jobs, threads(), ended)

    def arrivals(self) -> Iterator[str]:
        """Functions that are compiled behind, each once it is there: see `load_bundle`'s `first`.

        Raises:
          BundleError: one cannot be compiled.
        """
        return self._behind.done()

    def run(self, name: str, *inputs: Any) -> Any:
        """Run a function; it reads the weights, and reads and replaces the state.

        If it is still being compiled, this waits. Calls from several threads run one after the
        other. Results come back at once, as arrays that are computed in the background.

        Args:
          name: of `functions`.
          inputs: for each argument that is an input, a pytree with the structure it was exported
            with (or any with the same leaves in the same order), of numpy's or jax's arrays or
            Python numbers.

        Returns:
          The outputs, put together as they were: dicts, tuples, and named tuples, of `jax.Array`s.

        Raises:
          BundleError: no such function, or inputs of other shapes or dtypes.
        """
        leaves = self.run_flat(name, jax.tree.leaves(inputs))
        return fill(self.functions[name].tree, leaves)

    def run_flat(self, name: str, inputs: Sequence[Any]) -> list[jax.Array]:
        """Run a function on the leaves of its inputs; returns the leaves of its outputs."""
        call = self._calls.get(name)
        if call is None and self._behind.wait(name):
            call = self._calls[name]
        if call is None:
            raise BundleError(
                f"there is no function {name!r}; there are {', '.join(self.functions)}"
            )
        arrays = call.checked(inputs)
        given = call.placed(arrays)
        with _running:
            self._tell("run", [name], arrays)
            return call.run(self._held, given)

    def _tell(self, kind: str, names: Sequence[str] = (), arrays: Sequence[Any] = ()) -> None:
        if self.told is not None:
            self.told(kind, names, arrays)


KEPT = 1024
"""So many inputs of a function stay on the devices: numbers and arrays that nobody can write."""


class _Call:
    """How to call a program: which flat arguments are held, and which are given."""

    def __init__(self, program: CompiledFunction) -> None:
        self.program = program
        entry = program.entry
        inputs = set(entry.inputs)
        self.held = [None if leaf in inputs else leaf.path for leaf in entry.leaves()]
        self.state = [leaf.path for leaf in entry.leaves("state")]
        self.inputs = entry.inputs
        self.shardings = [
            s for s, path in zip(program.arguments, self.held, strict=True) if path is None
        ]
        self._kept: dict[tuple[Any, str, Sharding], tuple[Any, jax.Array]] = {}

    def checked(self, leaves: Sequence[Any]) -> list[Any]:
        if len(leaves) != len(self.inputs):
            names = ", ".join(leaf.path for leaf in self.inputs)
            raise BundleError(
                f"{self.program.entry.name} takes {len(self.inputs)} inputs ({names}), not "
                f"{len(leaves)}"
            )
        return [as_leaf(x, leaf) for x, leaf in zip(leaves, self.inputs, strict=True)]

    def placed(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """The inputs on the mesh: single numbers, and arrays that nobody can write, stay there."""
        with x64_if(self.program.emitted.needs_x64):
            known = [self._known(x, s) for x, s in zip(arrays, self.shardings, strict=True)]
            # To a device that is the only one the call takes what is not there faster.
            alone = self.program.emitted.mesh.size == 1
            there = [
                getattr(x, "sharding", s if alone else None)
                for x, s in zip(known, self.shardings, strict=True)
            ]
            return known if there == self.shardings else put(known, self.shardings)

    def _known(self, x: Any, sharding: Sharding) -> Any:
        if isinstance(x, jax.Array) or (x.shape and x.flags.writeable):
            return x
        key = id(x) if x.shape else x.tobytes(), x.dtype.name, sharding
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = x, *put([x], [sharding])  # with the array its id stays its own
        return self._kept[key][1]

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


def put(arrays: Sequence[Any], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Arrays that every process has as a whole, on the mesh."""
    if all(sharding.is_fully_addressable for sharding in shardings):
        placed: list[jax.Array] = jax.device_put(list(arrays), list(shardings))
        return placed
    # `device_put` would compare what the processes have, by a program of its own.
    whole = [np.asarray(x) for x in arrays]
    return [
        jax.make_array_from_callback(x.shape, s, x.__getitem__)
        for x, s in zip(whole, shardings, strict=True)
    ]


def as_leaf(x: Any, leaf: LeafEntry) -> Any:
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
