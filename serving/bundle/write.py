"""Writing a bundle: functions as portable StableHLO, weights beside them, all of it described."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from models.llama.weights.files import write_json
from models.llama.weights.save import TOKENIZER_FILES
from models.placement import OPEN, Entry
from serving.bundle.folder import hash_files, new_folder
from serving.bundle.function import ROLES, BundleError, Function, StateLeaf
from serving.bundle.manifest import (
    MANIFEST,
    PLATFORMS,
    STORED_AS,
    WEIGHTS,
    Argument,
    Entrypoint,
    Filled,
    Leaf,
    Manifest,
    StoredFile,
    check,
    check_fill,
    check_name,
    to_json,
)
from serving.bundle.placement import check_specs
from serving.bundle.tensors import MAX_FILE_BYTES, write_weights
from serving.bundle.trees import template_of
from spmd.api import path_name
from spmd.errors import SpmdError
from spmd.frontend.artifact import Calls, artifact_version, function_artifact

TOKENIZER = "tokenizer"
GENERATION_FILES = (*TOKENIZER_FILES, "generation_config.json", "config.json")


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
      functions: what it can do.
      weights: a pytree of arrays, or of what `numpy.asarray` reads when it is its turn, with shape
        and dtype (`serving.bundle.function.Weight`): one at a time is in memory.
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
      console: progress bars go here.

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
    arrays, weight_leaves = _weights(weights)
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
            state=_state(state),
            specs=plain_specs(specs or {}),
            contract=dict(contract or {}),
            goldens=() if callable(goldens) else tuple(goldens),
            quantization=quantization,
            tokenizer=tuple(f"{TOKENIZER}/{file}" for file in tokenizer),
            files={},
        )
        check_manifest(manifest)
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


def check_manifest(manifest: Manifest) -> None:
    """What can be said before weights are written: everything fits.

    Raises:
      BundleError: something does not.
    """
    entrypoints = manifest.functions.values()
    given = [leaf for entry in entrypoints for leaf in entry.inputs]
    made = [
        dataclasses.replace(leaf, path=f"outputs/{leaf.path}")
        for entry in entrypoints
        for leaf in entry.outputs
    ]
    check_specs(manifest.specs, [*manifest.weights, *manifest.state, *given, *made])
    later = StoredFile(0, "")  # of files nothing is known yet
    names = [*manifest.tokenizer, *(f for e in entrypoints for f in e.modules.values())]
    check(dataclasses.replace(manifest, files=dict.fromkeys(names, later)), "the bundle")


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
    packages = ("spmd", "jax", "jaxlib", "numpy")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**{p: _version(p) for p in packages}, "stablehlo": artifact_version(), "made": now}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# Leaves


def leaves_of(tree: Any, name: str) -> tuple[Leaf, ...]:
    """The leaves of an argument or result; paths begin with its name, if it has one.

    Raises:
      BundleError: a leaf that no bundle can hold.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = ("/".join(filter(None, (name, path_name(path)))) for path, _ in flat)
    return tuple(_leaf(path or "result", x) for path, (_, x) in zip(paths, flat, strict=True))


def _leaf(path: str, x: Any) -> Leaf:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise BundleError(f"{path} is {type(x).__name__}, which has no shape and dtype")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise BundleError(f"{path} is a key of jax.random; pass jax.random.key_data(key) instead")
    dtype = jnp.dtype(x.dtype).name
    if dtype not in STORED_AS:
        raise BundleError(f"{path} is {dtype}, not one of {', '.join(STORED_AS)}")
    return Leaf(path, tuple(map(int, x.shape)), dtype)


def _weights(weights: Any) -> tuple[list[Any], tuple[Leaf, ...]]:
    return jax.tree.leaves(weights), leaves_of(weights, WEIGHTS)


def _state(state: Any) -> tuple[Filled, ...]:
    arrays = jax.tree.leaves(state)
    fills = [x.fill if isinstance(x, StateLeaf) else 0 for x in arrays]
    leaves = tuple(
        Filled(leaf.path, leaf.shape, leaf.dtype, fill)
        for leaf, fill in zip(leaves_of(state, "state"), fills, strict=True)
    )
    for leaf in leaves:
        check_fill(leaf)
    return leaves


def plain_specs(specs: Mapping[str, Any]) -> dict[str, tuple[Entry, ...]]:
    """Specs as `spmd.mark_sharding` takes them, for JSON."""
    return {pattern: _plain_spec(pattern, spec) for pattern, spec in specs.items()}


def _plain_spec(pattern: str, spec: Any) -> tuple[Entry, ...]:
    entries = (spec,) if isinstance(spec, str) else tuple(() if spec is None else spec)
    plain: list[Entry] = []
    for entry in entries:
        if entry is ... or entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
            plain.append(OPEN)
        elif entry is None or isinstance(entry, str):
            plain.append(entry)
        elif isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry):
            plain.append(tuple(entry))
        else:
            raise BundleError(f"the spec of {pattern!r} has the entry {entry!r}; name the axis")
    return tuple(plain)


# Functions


def _write(folder: Path, function: Function, platforms: Sequence[str]) -> Entrypoint:
    """Export a function for every platform; equal artifacts are one file."""
    arguments = _arguments(function)
    modules: dict[str, str] = {}
    written: dict[bytes, str] = {}
    calls: list[Calls] = []
    out: Any = None
    for platform in platforms:
        try:
            data, out, called = function_artifact(function.fn, function.args, platform=platform)
        except SpmdError as error:
            raise BundleError(f"function {function.name}: {error.what}") from error
        calls.append(called)
        if data not in written:
            suffix = "" if not written else f".{platform}"
            written[data] = f"functions/{function.name}{suffix}.mlirbc"
            (folder / written[data]).write_bytes(data)
        modules[platform] = written[data]
    outputs = _outputs(function, arguments, out)
    return Entrypoint(
        name=function.name,
        tags=dict(function.tags),
        modules=modules,
        arguments=arguments,
        outputs=leaves_of(outputs, ""),
        tree=template_of(outputs),
        custom_calls=_most([c.custom_calls for c in calls]),
        composites=_most([c.composites for c in calls]),
    )


def _arguments(function: Function) -> tuple[Argument, ...]:
    check_name(function.name, "a function")
    names, roles = function.arg_names, function.roles
    if not len(names) == len(roles) == len(function.args):
        raise BundleError(
            f"function {function.name} has {len(function.args)} arguments, {len(names)} names and "
            f"{len(roles)} roles"
        )
    if len(set(names)) != len(names) or not set(roles) <= set(ROLES):
        raise BundleError(
            f"function {function.name}: names of arguments have to differ, and roles are "
            f"{', '.join(ROLES)}; they are {names} and {roles}"
        )
    arguments = []
    for name, role, struct in zip(names, roles, function.args, strict=True):
        # What the bundle owns has one name in all functions.
        leaves = leaves_of(struct, name if role == "input" else role)
        arguments.append(Argument(name, role, leaves))
    return tuple(arguments)


def _outputs(function: Function, arguments: Sequence[Argument], out: Any) -> Any:
    """What a function returns besides the state."""
    held = next((i for i, a in enumerate(arguments) if a.role == "state"), None)
    if held is None:
        return out
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise BundleError(
            f"function {function.name} has a state and has to return (state, outputs)"
        )
    state, outputs = out
    given = arguments[held].leaves
    if leaves_of(state, "state") != given:
        both = zip(leaves_of(state, "state"), given, strict=False)
        differing = next((f"{b.path}: {a} for {b}" for a, b in both if a != b), "another structure")
        raise BundleError(
            f"function {function.name} returns another state than it takes: {differing}"
        )
    return outputs


def _most(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = sorted({name for count in counts for name in count})
    return {name: max(count.get(name, 0) for count in counts) for name in names}
