"""A bundle's module files, read and lowered; what the cache has need not be."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.bundle.cache import Cache
from serving.bundle.function import BundleError, one_line
from serving.bundle.manifest import PLATFORMS, Entrypoint, Manifest
from serving.bundle.programs import Asked, emitted_of, static_module
from spmd.errors import SpmdError
from spmd.frontend.artifact import calls_of, is_artifact
from spmd.frontend.bytecode import BytecodeError, bytecode_to_text, bytecodes_to_texts
from spmd.frontend.importer.module import parse_module, signature
from spmd.ir.dialect.registry import is_known_call
from spmd.ir.types import numpy_dtype
from spmd.lowering.emitted import Emitted
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import platform_of
from spmd.options import Options


class Modules:
    """The modules of some functions of a bundle.

    Args:
      folder, manifest: the bundle.
      names: of the functions.
      mesh: what the functions are lowered for.
      options: of the compiler.
      cache: what was made of them before, if anything.

    Raises:
      BundleError: a function that was not exported for the mesh's platform.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        names: Sequence[str],
        mesh: Mesh,
        options: Options,
        cache: Cache | None,
    ) -> None:
        self.folder, self.mesh, self.options, self.cache = folder, mesh, options, cache
        self.platform = _platform(mesh)
        files = [self.file(manifest.functions[name]) for name in names]
        self.files: dict[str, bytes] = {file: (folder / file).read_bytes() for file in files}
        self.texts: dict[bytes, str] = {}

    def file(self, entry: Entrypoint) -> str:
        """The module of a function for this platform."""
        if self.platform not in entry.modules:
            raise BundleError(
                f"function {entry.name} was exported for {', '.join(entry.modules) or 'nothing'}, "
                f"not for {self.platform}; export it with this platform too"
            )
        return entry.modules[self.platform]

    def lower(self, entry: Entrypoint, asked: Asked) -> Emitted:
        """A function, lowered or taken from the cache.

        Raises:
          BundleError: a module that cannot be read or lowered, or is not what the manifest says.
        """
        file = self.file(entry)

        def make() -> Emitted:
            return self._lower(self.files[file], entry, asked)

        if self.cache is None:
            return make()
        return self.cache.emitted(self.files[file], self.mesh, self.options, asked, make)

    def _lower(self, data: bytes, entry: Entrypoint, asked: Asked) -> Emitted:
        what = f"{self.folder / self.file(entry)} (function {entry.name})"
        try:
            module = static_module(parse_module(self.text(data)), entry, asked)
            _check_signature(module, entry, what)
            _check_calls(module, what)
            return emitted_of(module, self.mesh, asked, self.options)
        except (SpmdError, BytecodeError) as error:
            raise BundleError(f"{what} cannot be used: {one_line(error)}") from error

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
