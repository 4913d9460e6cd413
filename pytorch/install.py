"""Checks that PyTorch and torchax are installed in versions that work together; loads torchax.

torchax 0.0.13 was written for an older PyTorch than 2.13: it uses overloads of ops that are gone,
and registers a decomposition that PyTorch has now. Both are corrected here while it is imported.
"""

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any
from unittest import mock

from spmd.errors import InstallError

WANTED = {"torch": "2.13", "torchax": "0.0.13"}
"""Package -> the beginning of the versions that are supported: 2.13 is 2.13.0, 2.13.1, ..."""

COMMAND = 'pip install "spmd[torch]"'


def check_installed(version_of: Callable[[str], str] = metadata.version) -> None:
    """Raises InstallError if torch or torchax is missing, or has a version not in `WANTED`."""
    for package, wanted in WANTED.items():
        try:
            have = version_of(package)
        except metadata.PackageNotFoundError as error:
            raise InstallError(
                f"spmd.torch needs {package}, which is not installed", fix=COMMAND
            ) from error
        if not f"{have.partition('+')[0]}.".startswith(f"{wanted}."):
            raise InstallError(
                f"spmd.torch does not know {package} {have}",
                actual=f"{package} {have}",
                required=f"{package} {wanted}",
                fix=COMMAND,
            )


def load_torchax() -> None:
    """Imports the modules of torchax that are used; InstallError as from `check_installed`."""
    check_installed()
    packet = importlib.import_module("torch._ops").OpOverloadPacket
    decompositions = importlib.import_module("torch._decomp")
    look_up, register = packet.__getattr__, decompositions._add_op_to_registry

    def found(self: Any, name: str) -> Any:
        """Looks up an op's overload; returns a text for those of named dims, gone in 2.13."""
        try:
            return look_up(self, name)
        except AttributeError:
            if "dimname" in name.lower() or "names" in name:
                return f"{self}.{name}"
            raise

    def add(registry: Any, op: Any, fn: Any) -> None:
        """Registers a decomposition, unless PyTorch has one for the op."""
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
