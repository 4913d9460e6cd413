"""The flags of scripts that run a bundle: which one, on which mesh, with which cache."""

import argparse
from pathlib import Path

import jax
from rich.console import Console

import spmd
from spmd import launch
from spmd.cli.flags import Parser, Switch, numbers
from spmd.cli.specs import mesh_axes, symbol_values
from spmd.launch.agree import digest
from spmd.mesh.spec import platform_of
from spmd.models.decode import PAGES
from spmd.progress import Stopwatch
from spmd.serving.bundle.batch import batch_sizes, batch_symbol
from spmd.serving.bundle.bundle import Bundle
from spmd.serving.bundle.cache import default_cache_dir
from spmd.serving.bundle.folder import read_manifest
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import MANIFEST, Sizes
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.symbols import MEMORY_SHARE, MEMORY_SHARE_ON_CPU, take_gpu_memory
from spmd.serving.language_backend import first_functions, served_functions

NO_CACHE = "none"

LOADING_S = 3600.0
"""So long the processes of a job wait for the one that reads its weights the slowest."""


def add_flags(parser: Parser) -> None:
    """Adds them."""
    add = parser.add_argument
    add("bundle", type=Path, help="folder of scripts/export_llama or spmd.serving.bundle.write")
    add(
        "--mesh",
        type=mesh_axes,
        help="axes and sizes, as in data=2,model=4: tensor parallelism over model, slots over "
        "data (default: all devices along model)",
    )
    add(
        "--cache_dir",
        default=str(default_cache_dir()),
        help=f"keeps plans and executables for the next start; {NO_CACHE}: nothing",
    )
    add(
        "--symbols",
        type=symbol_values,
        default={},
        help="sizes of the bundle's symbolic dims, as in n=128 (default: as the memory allows)",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--batch_sizes",
        type=numbers,
        help="rows of a call, where the batch of a function of tensors is symbolic, as in 1,8,32: "
        "requests are joined and padded to one of these",
    )
    sizes.add_argument(
        "--max_batch_size", type=int, help="the same with powers of two up to a number"
    )
    add(
        "--memory_share",
        type=float,
        help="of each device's memory that the bundle may take; on a GPU others have the rest "
        f"(default: {MEMORY_SHARE}; on CPUs {MEMORY_SHARE_ON_CPU})",
    )
    add(
        "--auto",
        action=Switch,
        default=False,
        help="the compiler chooses how arrays are split where the bundle has no specs",
    )
    add("--verify", action=Switch, default=True, help="compare the files' hashes")


@launch.line("loading")  # process 0 loads on a thread of its own
def load(
    given: argparse.Namespace, console: Console | None = None, *, serves: bool = False
) -> Bundle:
    """The bundle that the flags name, on its mesh.

    Args:
      serves: whether functions that serve all requests are enough to begin with.

    Raises:
      BundleError: it is none.
      MeshError: more devices than there are.
    """
    take_gpu_memory(given.memory_share)
    path = given.bundle / MANIFEST
    content = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    asked = {f"--{name}": str(getattr(given, name)) for name in ("mesh", "symbols", "memory_share")}
    launch.check_same({"the bundle's manifest (hash)": digest(content), **asked})
    symbols: dict[str, Sizes] = dict(given.symbols)
    if given.batch_sizes is not None or given.max_batch_size is not None:
        manifest = read_manifest(given.bundle)
        batch, sizes = batch_symbol(manifest), given.batch_sizes
        if batch in symbols:
            raise BundleError(f"the batch {batch} has a size in --symbols, and sizes of its own")
        symbols[batch] = batch_sizes(manifest, given.max_batch_size) if sizes is None else sizes
    cache = None if given.cache_dir == NO_CACHE else Path(given.cache_dir)
    clock = Stopwatch()
    axes = given.mesh or {"data": 1, "model": clock("devices", lambda: len(jax.devices()))}
    mesh = clock("devices", lambda: spmd.make_mesh(**axes))
    functions = None
    if serves:
        manifest = read_manifest(given.bundle)
        tags = {name: entry.tags for name, entry in manifest.functions.items()}
        functions = served_functions(manifest.contract, tags, platform_of(mesh))
    bundle = load_bundle(
        given.bundle,
        mesh,
        functions=functions,
        cache_dir=cache,
        console=console,
        verify=given.verify,
        symbols=symbols,
        memory_share=given.memory_share,
        beside=getattr(given, "speculative_model", None),
        auto=given.auto,
        first=first_functions if serves else None,
    )
    bundle.seconds = {**clock.seconds, **bundle.seconds}
    # Nobody begins before all are there: collectives would not wait for weights to be read.
    launch.check_same(
        {"symbols": str(dict(bundle.symbols))}, label="the loaded bundle", timeout_s=LOADING_S
    )
    if console is not None:
        for note in bundle.notes:
            console.print(f"note: {note}")
    return bundle


def load_draft(given: argparse.Namespace, bundle: Bundle, console: Console | None) -> Bundle:
    """The bundle of `--speculative_model`, with as many pages as `bundle`, on the same mesh."""
    changed = {"bundle": given.speculative_model, "symbols": {PAGES: bundle.symbols[PAGES]}}
    changed["speculative_model"] = None
    return load(argparse.Namespace(**{**vars(given), **changed}), console, serves=True)
