"""PyTorch and torchax: whether they are here, in versions that work together, and how to load them.

torchax 0.0.13 was written for an older PyTorch than 2.13: it asks for overloads of ops that are
gone, and registers a decomposition that PyTorch has now. Both are mended here, while it is loaded.
"""

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any
from unittest import mock

from spmd.errors import InstallError

WANTED = {"torch": "2.13", "torchax": "0.0.13"}
"""Package -> the releases that were tried: those that begin like this."""

COMMAND = 'pip install "spmd[torch]"'


def check_installed(version_of: Callable[[str], str] = metadata.version) -> None:
    """Raises InstallError if a package is missing, or in a version that was not tried."""
    for package, wanted in WANTED.items():
        try:
            have = version_of(package)
        except metadata.PackageNotFoundError as error:
            raise InstallError(
                f"spmd.torch needs {package}, which is not installed", fix=COMMAND
            ) from error
        if f"{have.partition('+')[0]}.".startswith(f"{wanted}."):
            continue
        raise InstallError(
            f"spmd.torch does not know {package} {have}",
            actual=f"{package} {have}",
            required=f"{package} {wanted}",
            fix=COMMAND,
        )


def load_torchax() -> None:
    """Imports what we use of torchax; InstallError if it or PyTorch is missing or unfit."""
    check_installed()
    packet = importlib.import_module("torch._ops").OpOverloadPacket
    decompositions = importlib.import_module("torch._decomp")
    look_up, register = packet.__getattr__, decompositions._add_op_to_registry

    def found(self: Any, name: str) -> Any:
        """Looks up overloads of named dims, which PyTorch 2.13 lacks, as names of no op."""
        try:
            return look_up(self, name)
        except AttributeError:
            if "dimname" in name.lower() or "names" in name:
                return f"{self}.{name}"
            raise

    def add(registry: Any, op: Any, fn: Any) -> None:
        """Keeps PyTorch's own decomposition where torchax registers one that PyTorch has."""
        try:
            register(registry, op, fn)
        except RuntimeError as error:
            if "duplicate" not in str(error):
                raise

    with (
        mock.patch.object(packet, "__getattr__", found),
        mock.patch.object(decompositions, "_add_op_to_registry", add),
    ):
        for module in ("torchax", "torchax.ops.jaten", "torchax.ops.jtorch", "torchax.interop"):
            importlib.import_module(module)
        # The rest is imported by whoever makes an environment.
        importlib.import_module("torchax.tensor").Environment()
