"""Loading a bundle for whatever mesh there is.

    files and hashes -> plans -> executables, in parallel with weights read onto the mesh -> state

No code of the bundle runs, and nothing is written but the cache.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from spmd import launch
from spmd.errors import SpmdError
from spmd.frontend.artifact import calls_of
from spmd.frontend.bytecode import MAGIC, BytecodeError, bytecode_to_text, bytecodes_to_texts
from spmd.frontend.canonicalize import CANONICAL
from spmd.frontend.importer.module import parse_module, signature
from spmd.ir.description import is_known_call
from spmd.ir.types import numpy_dtype
from spmd.lowering.emit import Emitted
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import as_mesh, platform_of
from spmd.options import Options
from spmd.progress import Stopwatch
from spmd.serving.bundle import programs
from spmd.serving.bundle.bundle import Bundle
from spmd.serving.bundle.cache import Cache, as_text, from_text
from spmd.serving.bundle.folder import check_hashes, read_manifest
from spmd.serving.bundle.function import BundleError, one_line
from spmd.serving.bundle.manifest import AUTO, PLATFORMS, WEIGHTS, Entrypoint, Manifest, Sizes
from spmd.serving.bundle.symbols import Held, plan_sized, planner, too_much
from spmd.serving.bundle.tensors import check_stored, read_weights


class Modules:
    """The modules of some functions of a bundle.

    Args:
      names: of the functions; those that are needed first come first.
      soon: how many these are.
      cache: what was made of them before, if anything.

    Raises:
      BundleError: a function that was not exported for the mesh's platform.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        names: Sequence[str],
        soon: int,
        mesh: Mesh,
        options: Options,
        cache: Cache | None,
    ) -> None:
        self.folder, self.mesh, self.options, self.cache = folder, mesh, options, cache
        self.platform = platform_of(mesh)
        if self.platform not in PLATFORMS:
            known = ", ".join(PLATFORMS)
            raise BundleError(f"the mesh has {self.platform} devices, not one of {known}")
        files = [self.file(manifest.functions[name]) for name in names]
        self.files: dict[str, bytes] = {file: (folder / file).read_bytes() for file in files}
        # Those that are needed first are read first.
        self.halves = [[self.files[file] for file in half] for half in (files[:soon], files[soon:])]
        self.texts: dict[bytes, str] = {}
        self.modules: dict[str, Any] = {}

    def file(self, entry: Entrypoint) -> str:
        """The module of a function for this platform."""
        if self.platform not in entry.modules:
            raise BundleError(
                f"function {entry.name} was exported for {', '.join(entry.modules) or 'nothing'}, "
                f"not for {self.platform}; export it with this platform too"
            )
        return entry.modules[self.platform]

    def lower(self, entry: Entrypoint, asked: programs.FunctionKey) -> Emitted:
        """A function, lowered or taken from the cache; in a job by process 0, for all.

        Raises:
          BundleError: a module that cannot be read or lowered, or is not what the manifest says.
        """
        file = self.file(entry)

        def make() -> Emitted:
            what = f"{self.folder / file} (function {entry.name})"
            try:
                if file not in self.modules:  # for several sizes it is parsed once
                    self.modules[file] = parse_module(self.text(self.files[file]))
                module = programs.static_module(self.modules[file], entry, asked)
                _check_signature(module, entry, what)
                called = calls_of(module).custom_calls
                known = {key.partition(":")[2] for key in CANONICAL}
                unknown = [n for n in called if n not in known and not is_known_call(n)]
                if unknown:  # XLA might abort the process on it
                    raise BundleError(
                        f"{what} calls {', '.join(unknown[:5])[:200]}, which is unknown here; "
                        "import what registers it (spmd.register_rule), or export without it"
                    )
                return programs.emitted_of(module, self.mesh, asked, self.options)
            except (SpmdError, BytecodeError) as error:
                raise BundleError(f"{what} cannot be used: {one_line(error)}") from error

        def found() -> Emitted:
            if self.cache is None:
                return make()
            return self.cache.emitted(self.files[file], self.mesh, self.options, asked, make)

        if jax.process_count() == 1:
            return found()
        text = launch.made_by_first(lambda: as_text(found()), label=f"planning {entry.name}")
        return from_text(text, self.mesh)

    def text(self, data: bytes) -> str:
        """The text of a module; the first one of those needed first, or later, has all read."""
        if not data.startswith(MAGIC):
            raise BytecodeError("it is no portable artifact")
        if data not in self.texts:
            half = next(half for half in self.halves if data in half)
            groups: list[list[bytes]] = []
            for one in (d for d in dict.fromkeys(half) if d.startswith(MAGIC)):
                if not groups or sum(map(len, groups[-1])) + len(one) > GROUP_BYTES:
                    groups.append([])
                groups[-1].append(one)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for group, texts in zip(groups, pool.map(_texts, groups), strict=True):
                    self.texts |= zip(group, texts, strict=False)
        if data not in self.texts:  # it, or one that was read with it, is damaged
            self.texts[data] = bytecode_to_text(data)
        return self.texts[data]


GROUP_BYTES = 4 << 20
"""Of modules that are read by one process: its start takes longer than reading a small one."""


def _texts(group: Sequence[bytes]) -> list[str]:
    """Their texts; none where not all can be read."""
    try:
        return bytecodes_to_texts(group)
    except BytecodeError:
        return []


def _check_signature(module: Any, entry: Entrypoint, what: str) -> None:
    """Raise unless a module takes and gives what the manifest says."""
    args, results = signature(module)
    for kind, found, wanted in (
        ("takes", args, entry.leaves()),
        ("gives", results, [*entry.leaves("state"), *entry.outputs]),
    ):
        if len(found) != len(wanted):
            raise BundleError(
                f"{what} {kind} {len(found)} arrays and the manifest says {len(wanted)}"
            )
        for type_, leaf in zip(found, wanted, strict=True):
            if (type_.shape, numpy_dtype(type_.dtype).name) != (leaf.shape, leaf.dtype):
                raise BundleError(
                    f"{what} {kind} {type_} where the manifest says {leaf.path} "
                    f"{leaf.dtype}{list(leaf.shape)}"
                )


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
    symbols: Mapping[str, Sizes] | None = None,
    memory_share: float | None = None,
    beside: str | Path | None = None,
    auto: bool = False,
    first: Callable[[Manifest], Collection[str]] | None = None,
) -> Bundle:
    """Check a bundle, partition its functions for a mesh, and read its weights onto it.

    Args:
      folder: as `write_bundle` made it; every process of a job has to see it.
      mesh: a `spmd.Mesh`, or jax's.
      cache_dir: where plans and executables are kept for the next start, as
        `spmd.serving.bundle.cache.default_cache_dir()`; None keeps nothing.
      console: progress goes here if it is a terminal, else to the log.
      verify: whether to compare every file's SHA-256; sizes are compared in any case.
      functions: names of those to compile; all if left out.
      symbols: sizes of symbolic dims: name -> value. One that is left out, and is in the state, is
        as large as the memory of the devices allows. One that is not in the state may have several:
        with `{"b": (1, 8)}` a function `f` of it becomes `f[b=1]` and `f[b=8]`, which share the
        weights.
      memory_share: of each device's memory, which the bundle may take for that: above 0, at most 1;
        0.95 if left out (on CPUs 0.1).
      beside: the folder of a bundle that is loaded after this one, with the same size of that
        symbol: memory is left for its weights and its state.
      auto: whether the compiler chooses specs for this mesh where the bundle has none.
      first: says which functions have to be there before the bundle is returned. The others are
        planned and compiled behind, see `Bundle.arrivals`; a call of one waits for it. None is all.

    Returns:
      The bundle, ready to run. Without `first` nothing is compiled later.

    Raises:
      BundleError: a bundle that is damaged, does not fit together, or cannot be compiled for this
        mesh. Nothing is left behind then.

    Example:
      >>> bundle = load_bundle("llama-bundle", spmd.make_mesh(data=1, model=8))
      >>> bundle.run("step_r8_t512", rows)
    """
    folder, mesh = Path(folder), as_mesh(mesh)
    options = options or Options()
    clock = Stopwatch()
    manifest = clock("files", read_manifest, folder)
    if auto:
        manifest = dataclasses.replace(manifest, contract={**manifest.contract, AUTO: True})
    if manifest.weights:
        clock("files", check_stored, folder / WEIGHTS, manifest.weights)
    wanted = list(manifest.functions if functions is None else functions)
    for name in wanted:
        if name not in manifest.functions:
            known = ", ".join(manifest.functions)
            raise BundleError(f"there is no function {name!r}; there are {known}")
    unchecked = clock("files", _check_files, folder, manifest, console) if verify else []
    cache = Cache(cache_dir) if cache_dir is not None else None
    with _fitting(folder), contextlib.ExitStack() as caching:
        if cache is not None:
            caching.enter_context(cache.executables())
        soon = (
            wanted if first is None else programs.with_all_leaves(manifest, first(manifest), wanted)
        )
        _tell(console, f"planning {len(soon)} of {len(wanted)} functions for {mesh}")
        first_names = programs.with_primary(manifest, soon)
        names = list(dict.fromkeys([*first_names, *wanted]))
        count = len(first_names)
        modules = Modules(folder, manifest, names, count, mesh.refined(), options, cache)
        with _status(console) as say:
            plan = planner(manifest, mesh, modules.lower, say)
            held = functools.partial(_held, beside, mesh, options, cache) if beside else None
            how = symbols, mesh, options, memory_share, plan, soon, held
            planned = clock("planning", plan_sized, manifest, *how)
        manifest, notes = planned.manifest, planned.notes
        wanted = [entry.name for name in wanted for entry in manifest.variants(name)]
        count = len(planned.emitted.keys() & set(wanted))
        _tell(console, f"compiling {count} functions, and reading weights meanwhile")
        reading = functools.partial(_read, folder, manifest, unchecked, console, clock)
        waiting = functools.partial(_status, console, f"compiling {count} functions")
        made = planned.emitted, planned.more, wanted, options, reading, waiting
        parts = clock("compiling", programs.compile_functions, manifest, mesh, *made)
        notes += clock("compiling", too_much, planned, parts.programs, mesh)
        notes += programs.nothing_split(manifest, planned.emitted, mesh)
        if cache is not None:
            notes += cache.notes
        bundle = clock("state", Bundle, manifest, mesh, parts, notes, planned.symbols)
        bundle.seconds = clock.seconds
        bundle.compile_behind(parts.later, caching.pop_all().close)
        return bundle


def _held(folder: str | Path, mesh: Mesh, options: Options, cache: Cache | None) -> Held:
    """What a bundle will hold on a mesh, as its primary function has it for the least sizes."""
    manifest = read_manifest(folder)
    names = programs.with_primary(manifest, ())
    modules = Modules(Path(folder), manifest, names, len(names), mesh.refined(), options, cache)
    least = {
        name: -(-symbol.at_least // symbol.multiple_of) * symbol.multiple_of
        for name, symbol in manifest.symbols.items()
    }
    planned = planner(manifest, mesh, modules.lower)(least, (), False)
    return manifest, programs.placements(planned.manifest, planned.emitted, mesh)


def _check_files(folder: Path, manifest: Manifest, console: Console | None) -> list[str]:
    """Checks the files' hashes; returns the names of those that are checked while they are read.

    These are the weights. Processes of one job share the checking, and say so to each other before
    anything else; so there it is done at once.
    """
    later = [name for name in manifest.files if name.startswith(f"{WEIGHTS}/")]
    later = later if jax.process_count() == 1 else []
    names = sorted(manifest.files.keys() - set(later))
    size = sum(manifest.files[name].size for name in names)
    _tell(console, f"checking {len(names)} files, {size / 1e9:.2f} GB")
    check_hashes(folder, manifest, console, names)
    return later


def _read(
    folder: Path,
    manifest: Manifest,
    unchecked: Sequence[str],
    console: Console | None,
    clock: Stopwatch,
    placed: programs.Placed,
) -> Mapping[str, jax.Array]:
    """Reads the weights onto the mesh, and meanwhile compares the hashes of files."""
    with contextlib.ExitStack() as checking:
        if unchecked:
            pool = checking.enter_context(ThreadPoolExecutor(1))
            checked = pool.submit(check_hashes, folder, manifest, None, unchecked)
            checking.callback(clock, "hashes", checked.result)
        stored = folder / WEIGHTS, manifest.weights
        arrays = clock("weights", read_weights, *stored, placed, console)
    _tell(console, f"the weights are read{' and checked' if unchecked else ''}")
    return arrays


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
def _status(console: Console | None, text: str = "") -> Iterator[programs.Say]:
    """Says what goes on in one line of a terminal, at first a text, or not at all."""
    if console is None or not console.is_terminal or jax.process_index():
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update
