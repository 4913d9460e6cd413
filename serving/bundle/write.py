"""Writing a bundle: functions as portable StableHLO, weights beside them, all of it described."""

import dataclasses
import datetime
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.errors import InconclusiveDimensionOperation
from rich.console import Console

import spmd
from spmd.errors import SpmdError
from spmd.frontend.artifact import CustomCalls, artifact_version, function_artifact
from spmd.models.llama.weights.files import write_json
from spmd.models.llama.weights.save import GENERATION_CONFIG_FILE, TOKENIZER_FILES
from spmd.serving.bundle import describe
from spmd.serving.bundle.folder import hash_files, new_folder
from spmd.serving.bundle.function import BundleError, Function, one_line
from spmd.serving.bundle.manifest import MANIFEST, PLATFORMS, WEIGHTS, Entrypoint, Manifest
from spmd.serving.bundle.manifest_json import check, to_json
from spmd.serving.bundle.tensors import MAX_FILE_BYTES, write_weights

TOKENIZER = "tokenizer"
GENERATION_FILES = (*TOKENIZER_FILES, GENERATION_CONFIG_FILE, "config.json")

Goldens = Callable[[Path], Sequence[Mapping[str, Any]]]


def write_bundle(
    folder: str | Path,
    functions: Sequence[Function],
    *,
    weights: Any = None,
    specs: Mapping[str, Any] | None = None,
    state: Any = None,
    primary: str | None = None,
    tokenizer_from: str | Path | None = None,
    contract: Mapping[str, Any] | None = None,
    goldens: Sequence[Mapping[str, Any]] | Goldens = (),
    quantization: Mapping[str, Any] | None = None,
    name: str = "bundle",
    platforms: Sequence[str] = PLATFORMS,
    max_file_bytes: int = MAX_FILE_BYTES,
    console: Console | None = None,
) -> None:
    """Write a folder that `load_bundle` runs on any mesh. It appears when it is whole.

    Args:
      folder: new or empty.
      functions: what it can do. Arguments may have symbolic dims (`jax.export.symbolic_shape`):
        whoever loads the bundle says how large they are, or the memory of the devices does.
      weights: a pytree of arrays, or of what `numpy.asarray` reads when it is its turn, with shape
        and dtype, and that jax takes for a leaf (a dataclass is one, a named tuple is not): one at
        a time is in memory.
      specs: pattern of paths, as `weights/layers/*/q_proj/weight` or `state/cache/k`, -> what
        splits each dim by default: an axis, a tuple of axes, None, or `...` (up to the compiler).
        Dims beyond a spec are not split. The first pattern that matches counts. Paths of inputs
        begin with the argument's name, those of outputs with `outputs/`. What no pattern matches
        is up to the compiler.
      state: a pytree of `StateLeaf`s (or of `ShapeDtypeStruct`s: zeros) of the state's structure.
      primary: the function that is planned first, and whose plan decides how weights and state
        lie where specs leave that open; the first one if left out.
      tokenizer_from: a folder whose tokenizer files are copied along.
      contract: what callers have to know, for JSON.
      goldens: inputs and what they give, for JSON; servers try them at start. Or a function of the
        folder, whole but for them, that makes them.
      quantization: how the weights were made smaller, for JSON.
      name: what the bundle is called.
      platforms: those to write functions for; jax writes a few ops differently for each.
      max_file_bytes: bytes of tensors in one file of weights.

    Raises:
      BundleError: functions, weights, state and specs that do not fit each other, or a folder that
        cannot be written.
      SpmdError: a function that cannot be exported.

    Example:
      >>> step = Function("step", lambda w, s, x: (s + 1, x @ w["k"]), (w_structs, count, x),
      ...                 ("weights", "state", "x"), ("weights", "state", "input"))
      >>> write_bundle("linear", [step], weights={"k": kernel},
      ...               state=StateLeaf((), "int32"), specs={"weights/k": (None, "model")})
    """
    if jax.process_count() > 1:
        raise BundleError("export a bundle from one process; it may hold all devices of its host")
    if not functions:
        raise BundleError("there is no function to export")
    if len({function.name for function in functions}) != len(functions):
        raise BundleError("two functions have the same name")
    arrays, weight_leaves = jax.tree.leaves(weights), describe.leaves_of(weights, WEIGHTS)
    tokenizer = tokenizer_files(tokenizer_from) if tokenizer_from is not None else {}
    with new_folder(folder) as unfinished:
        (unfinished / "functions").mkdir()
        entrypoints = {f.name: _write(unfinished, f, platforms) for f in functions}
        manifest = Manifest(
            name=name,
            producer=producer(),
            primary=primary or functions[0].name,
            functions=entrypoints,
            weights=weight_leaves,
            state=describe.state_leaves(state),
            specs=describe.plain_specs(specs or {}),
            contract=dict(contract or {}),
            goldens=() if callable(goldens) else tuple(goldens),
            quantization=quantization,
            tokenizer=tuple(f"{TOKENIZER}/{file}" for file in tokenizer),
            symbols=describe.symbols_of(functions),
        )
        describe.check_manifest(manifest)
        if weight_leaves:
            write_weights(
                unfinished / WEIGHTS, weight_leaves, arrays,
                max_file_bytes=max_file_bytes, console=console,
            )  # fmt: skip
        if tokenizer:
            (unfinished / TOKENIZER).mkdir()
        for file, source in tokenizer.items():
            shutil.copyfile(source, unfinished / TOKENIZER / file)
        manifest = finish(unfinished, manifest, console)
        if callable(goldens):
            made = tuple(goldens(unfinished))
            write_manifest(unfinished, dataclasses.replace(manifest, goldens=made))


def finish(folder: Path, manifest: Manifest, console: Console | None = None) -> Manifest:
    """Write the manifest of a folder that is whole but for it; returns it with the files."""
    manifest = dataclasses.replace(manifest, files=hash_files(folder, console))
    check(manifest, str(folder / MANIFEST))
    write_manifest(folder, manifest)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the file.

    Raises:
      BundleError: something in it that JSON does not have.
    """
    try:
        write_json(folder / MANIFEST, to_json(manifest))
    except (TypeError, ValueError) as error:
        raise BundleError(f"contract, goldens and quantization have to be JSON: {error}") from None


def tokenizer_files(folder: str | Path) -> dict[str, Path]:
    """Name -> file of what a folder says of its tokenizer and of generation.

    Raises:
      BundleError: there is none.
    """
    found = {n: Path(folder) / n for n in GENERATION_FILES if (Path(folder) / n).is_file()}
    if not set(found) & set(TOKENIZER_FILES):
        raise BundleError(f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES[:2])}, ...)")
    return found


def producer() -> dict[str, str]:
    """What makes a bundle: versions, and the time."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {package.__name__: package.__version__ for package in (spmd, jax, jaxlib, np)}
    return {**versions, "stablehlo": artifact_version(), "made": now}


# Functions


def _write(folder: Path, function: Function, platforms: Sequence[str]) -> Entrypoint:
    """Export a function for every platform; equal artifacts are one file."""
    describe.arguments_of(function)  # before it is traced
    modules: dict[str, str] = {}
    written: dict[bytes, str] = {}
    calls: list[CustomCalls] = []
    out: Any = None
    for platform in platforms:
        try:
            data, out, called = function_artifact(function.fn, function.args, platform=platform)
        except SpmdError as error:
            raise BundleError(f"function {function.name}: {error.what}") from error
        except InconclusiveDimensionOperation as error:
            raise BundleError(
                f"function {function.name} cannot be exported for all sizes of its symbolic dims: "
                f"{one_line(error)} Tell jax.export.symbolic_shape more (constraints), or decide "
                "by dims that are numbers"
            ) from error
        calls.append(called)
        if data not in written:
            suffix = "" if not written else f".{platform}"
            written[data] = f"functions/{function.name}{suffix}.mlirbc"
            (folder / written[data]).write_bytes(data)
        modules[platform] = written[data]
    return describe.entrypoint(function, out, modules, calls)
