"""Runs one program of this folder or of tools/, for `benchmarks/run` and `tools/run`.

What jax reads when it is imported is said here, before the program is imported.

    python -m benchmarks tools.fuzz --help
"""

import importlib
import os
import sys

from benchmarks.environment import xla_flags

ON_CPUS = (
    "drafts", "serving_plan", "slices",  # for machines not here
    "bytes", "compare_shardy", "compiler", "contract", "coverage", "fuzz", "memory", "transfer",
)  # fmt: skip
"""They run nothing that would need a GPU."""

COMPILED = ("bytes", "compiler", "coverage", "fuzz")
"""They compile for eight virtual devices, and run next to nothing."""

EIGHT_DEVICES = ("compare_training", "contract", "memory", "transfer")
"""They take eight virtual devices where the user says nothing."""


def main(module: str) -> object:
    """Imports a program, and runs it with the flags of the command line."""
    name = module.rpartition(".")[2]
    if name in ON_CPUS:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if name in COMPILED:
        os.environ["XLA_FLAGS"] = xla_flags(os.environ.get("XLA_FLAGS", ""))
    if name in EIGHT_DEVICES:
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    return importlib.import_module(module).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv.pop(1)))  # type: ignore[arg-type]  # a status, or None
