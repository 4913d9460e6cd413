"""The flags of scripts that run a bundle: which one, on which mesh, with which cache."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
from rich.console import Console

import spmd
from serving.bundle.bundle import Bundle
from serving.bundle.cache import default_cache_dir
from serving.bundle.function import BundleError
from serving.bundle.read import load_bundle

NO_CACHE = "none"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    add = parser.add_argument
    add("bundle", type=Path, help="folder made by scripts/export_llama or serving.bundle.write")
    add(
        "--mesh",
        help="axes and sizes, as in data=2,model=4: tensor parallelism over model, slots over "
        "data (default: all devices along model)",
    )
    add(
        "--cache_dir",
        default=str(default_cache_dir()),
        help=f"keeps plans and executables for the next start; {NO_CACHE}: nothing "
        "(default: %(default)s)",
    )
    add("--no_verify", action="store_true", help="do not compare the files' hashes")


def make_mesh(text: str | None) -> spmd.Mesh:
    """`"data=2,model=4"` as a mesh.

    Raises:
      BundleError: not of that form.
      MeshError: more devices than there are.
    """
    if text is None:
        return spmd.make_mesh(data=1, model=len(jax.devices()))
    axes = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in axes:
            raise BundleError(
                f"--mesh: {item!r} is not of the form axis=size, as in data=2,model=4"
            )
        axes[name] = int(size)
    return spmd.make_mesh(**axes)


def load(given: argparse.Namespace, console: Console | None = None) -> Bundle:
    """The bundle that the flags name, on its mesh."""
    cache = None if given.cache_dir == NO_CACHE else Path(given.cache_dir)
    bundle = load_bundle(
        given.bundle,
        make_mesh(given.mesh),
        cache_dir=cache,
        console=console,
        verify=not given.no_verify,
    )
    if console is not None:
        for note in bundle.notes:
            console.print(f"note: {note}")
    return bundle
