"""A bundle's functions as programs of a mesh: planned one after the other, compiled in parallel.

The primary function is planned first, from the specs of the manifest. What its plan makes of the
weights and the state is given to all others.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from serving.bundle.cache import Cache
from serving.bundle.function import BundleError, one_line
from serving.bundle.manifest import PLATFORMS, Entrypoint, Leaf, Manifest
from serving.bundle.placement import Spec, spec_for
from spmd.api import lower_stablehlo
from spmd.errors import SpmdError
from spmd.frontend.artifact import calls_of, is_artifact
from spmd.frontend.bytecode import BytecodeError, bytecode_to_text, bytecodes_to_texts
from spmd.frontend.importer.module import parse_module, signature
from spmd.ir.dialect.registry import is_known_call
from spmd.ir.types import numpy_dtype
from spmd.lowering.emitted import Emitted
from spmd.lowering.execute import compile_emitted
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import jax_mesh, platform_of
from spmd.options import Options


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, compiled.

    Attributes:
      entry: what the manifest says of it.
      emitted: what is compiled.
      executable: takes and returns flat arrays.
      arguments, results: their shardings.
    """

    entry: Entrypoint
    emitted: Emitted
    executable: Any
    arguments: tuple[NamedSharding, ...]
    results: tuple[NamedSharding, ...]


Say = Callable[[str], None]
"""Tells people what goes on."""


def plan_functions(
    folder: Path,
    manifest: Manifest,
    wanted: Sequence[str],
    mesh: Mesh,
    options: Options,
    cache: Cache | None,
    say: Say,
) -> tuple[dict[str, Emitted], list[str]]:
    """The primary function and those that are wanted, planned and partitioned in this order.

    Returns:
      Name -> emitted program, and a sentence on each part of a spec that does not fit the mesh.

    Raises:
      BundleError: a module that cannot be read or compiled, or is not what the manifest says.
    """
    platform = _platform(mesh)
    names = list(dict.fromkeys([manifest.primary, *wanted]))
    planner = _Planner(folder, manifest, mesh, options, cache, platform)
    planner.read(names)
    emitted = {}
    for number, name in enumerate(names, start=1):
        say(f"planning {name} ({number} of {len(names)})")
        emitted[name] = planner.plan(manifest.functions[name])
    return emitted, list(dict.fromkeys(planner.notes))


def compile_functions(
    manifest: Manifest,
    emitted: Mapping[str, Emitted],
    options: Options,
    pool: concurrent.futures.Executor,
) -> dict[str, concurrent.futures.Future[Program]]:
    """Starts compiling every function; name -> what will be its program."""
    return {
        name: pool.submit(_compile, manifest.functions[name], program, options)
        for name, program in emitted.items()
    }


def compile_threads() -> int:
    """How many functions are compiled at a time; processes of one job do it in one order."""
    return 1 if jax.process_count() > 1 else max(2, min(8, os.cpu_count() or 1))


def _compile(entry: Entrypoint, emitted: Emitted, options: Options) -> Program:
    try:
        executable = compile_emitted(emitted, options.compiler_options)
    except (RuntimeError, SpmdError) as error:
        raise BundleError(f"function {entry.name} cannot be compiled: {one_line(error)}") from error
    mesh = jax_mesh(emitted.mesh)
    arguments = tuple(NamedSharding(mesh, spec) for spec in emitted.argument_specs)
    results = tuple(NamedSharding(mesh, spec) for spec in emitted.result_specs)
    return Program(entry, emitted, executable, arguments, results)


class _Planner:
    """Plans functions one after the other; what the first ones decide holds for the others."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        mesh: Mesh,
        options: Options,
        cache: Cache | None,
        platform: str,
    ) -> None:
        self.folder, self.manifest, self.mesh = folder, manifest, mesh
        self.refined = mesh.refined()
        self.options, self.cache, self.platform = options, cache, platform
        self.notes: list[str] = []
        self.decided: dict[str, Spec] = {}
        self.files: dict[str, bytes] = {}
        self.texts: dict[bytes, str] = {}

    def read(self, names: Sequence[str]) -> None:
        """Reads the modules of functions; those in bytecode in other processes, together."""
        for name in names:
            file = self.file(self.manifest.functions[name])
            self.files[file] = (self.folder / file).read_bytes()

    def file(self, entry: Entrypoint) -> str:
        """The module of a function for this platform."""
        if self.platform not in entry.modules:
            raise BundleError(
                f"function {entry.name} was exported for {', '.join(entry.modules) or 'nothing'}, "
                f"not for {self.platform}; export it with this platform too"
            )
        return entry.modules[self.platform]

    def plan(self, entry: Entrypoint) -> Emitted:
        leaves = [leaf for argument in entry.arguments for leaf in argument.leaves]
        given = [self.spec(leaf) for leaf in leaves]
        updates = _updates(entry)
        results = [None] * len(updates) + [self.output(leaf) for leaf in entry.outputs]
        data = self.files[self.file(entry)]
        emitted = self.cached(data, given, results, updates, entry)
        owned = [a.role != "input" for a in entry.arguments for _ in a.leaves]
        for leaf, spec, is_owned in zip(leaves, emitted.argument_specs, owned, strict=True):
            if is_owned:
                self.decided.setdefault(leaf.path, tuple(spec))
        return emitted

    def spec(self, leaf: Leaf) -> Spec:
        if leaf.path in self.decided:
            return self.decided[leaf.path]
        return spec_for(leaf, self.manifest.specs, self.mesh, self.notes)

    def output(self, leaf: Leaf) -> Spec:
        """How a result lies: as the specs of `outputs/` say, else open."""
        if jax.process_count() > 1:
            return ()  # each process reads all of it
        named = dataclasses.replace(leaf, path=f"outputs/{leaf.path}")
        return spec_for(named, self.manifest.specs, self.mesh, self.notes)

    def cached(
        self, data: bytes, given: Any, results: Any, updates: Any, entry: Entrypoint
    ) -> Emitted:
        def make() -> Emitted:
            return self.emitted(data, given, results, updates, entry)

        if self.cache is None:
            return make()
        return self.cache.emitted(data, self.refined, self.options, (given, results, updates), make)

    def emitted(
        self, data: bytes, given: Any, results: Any, updates: Any, entry: Entrypoint
    ) -> Emitted:
        what = f"{self.folder / self.file(entry)} (function {entry.name})"
        try:
            module = parse_module(self.text(data))
            _check_signature(module, entry, what)
            _check_calls(module, what)
            lowered = lower_stablehlo(module, self.refined, given, results, self.options, updates)
        except (SpmdError, BytecodeError) as error:
            raise BundleError(f"{what} cannot be used: {one_line(error)}") from error
        return lowered.stages.emitted

    def text(self, data: bytes) -> str:
        """The text of a module; the first one in bytecode has all others read along with it."""
        if not is_artifact(data):
            raise BytecodeError("it is no portable artifact")
        if data not in self.texts:
            waiting = [d for d in dict.fromkeys(self.files.values()) if is_artifact(d)]
            groups = _groups(waiting)
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                for group, texts in zip(groups, pool.map(_texts, groups), strict=True):
                    self.texts |= zip(group, texts, strict=False)
        if data not in self.texts:  # it, or one that was read with it, is damaged
            self.texts[data] = bytecode_to_text(data)
        return self.texts[data]


GROUP_BYTES = 4 << 20


def _groups(modules: Sequence[bytes]) -> list[list[bytes]]:
    """Modules to be read by one process: its start takes longer than reading a small one."""
    groups: list[list[bytes]] = []
    for data in modules:
        if not groups or sum(map(len, groups[-1])) + len(data) > GROUP_BYTES:
            groups.append([])
        groups[-1].append(data)
    return groups


def _texts(group: Sequence[bytes]) -> list[str]:
    """Their texts; none where not all can be read."""
    try:
        return bytecodes_to_texts(group)
    except BytecodeError:
        return []


def _updates(entry: Entrypoint) -> list[tuple[int, int]]:
    """(result, argument) of every leaf of the state: it comes first among the results."""
    roles = [a.role for a in entry.arguments for _ in a.leaves]
    held = [number for number, role in enumerate(roles) if role == "state"]
    return list(enumerate(held))


def _check_signature(module: Any, entry: Entrypoint, what: str) -> None:
    """Raise unless a module takes and gives what the manifest says."""
    args, results = signature(module)
    wanted_args = [leaf for a in entry.arguments for leaf in a.leaves]
    wanted_results = [*entry.leaves("state"), *entry.outputs]
    for kind, found, wanted in (
        ("takes", args, wanted_args),
        ("gives", results, wanted_results),
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


def _check_calls(module: Any, what: str) -> None:
    """Raise if a module calls what nobody knows: XLA might abort the process on it."""
    unknown = [name for name in calls_of(module).custom_calls if not is_known_call(name)]
    if unknown:
        raise BundleError(
            f"{what} calls {', '.join(unknown[:5])[:200]}, which is unknown here; import what "
            "registers it (spmd.register_rule), or export without it"
        )


def _platform(mesh: Mesh) -> str:
    platform = platform_of(mesh)
    if platform not in PLATFORMS:
        raise BundleError(f"the mesh has {platform} devices, not one of {', '.join(PLATFORMS)}")
    return platform
