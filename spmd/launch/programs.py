"""Programs: before XLA sees one, the processes of its mesh compare what they have compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from spmd.launch.agree import check_same, digest
from spmd.mesh.mesh import Mesh

PROCESS_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
"""XLA flags that may differ from process to process."""


def check_same_program(
    name: str, emitted: str, mesh: Mesh, jax_mesh: jax.sharding.Mesh, more: Mapping[str, str]
) -> None:
    """Compares a compiled program, its mesh and what XLA is told with the other processes'.

    Args:
      name: the program's name.
      emitted: the per-device module as text; source locations are left out.
      mesh: the mesh.
      jax_mesh: the same mesh of jax devices, which tell the processes that take part.
      more: other names and values that should be equal.

    Raises:
      LaunchError: as for `check_same`.
    """
    processes = sorted({device.process_index for device in jax_mesh.devices.flat})
    if len(processes) < 2:
        return
    what = {
        "number of devices": str(jax.device_count()),
        "mesh": str(mesh),
        "order of devices": digest(str(mesh.device_ids)),
        "program hash": digest(without_locations(emitted)),
        **settings(),
        **more,
    }
    check_same(what, label=f"program {name}", processes=processes)


def without_locations(module: str) -> str:
    """A module's text without the lines that name source files: paths differ between hosts."""
    return "\n".join(line for line in module.splitlines() if not line.startswith("#loc"))


def settings() -> dict[str, str]:
    """The settings of jax and flags of XLA that may change what is computed."""
    found = {}
    for name in (
        "jax_enable_x64",
        "jax_default_matmul_precision",
        "jax_default_prng_impl",
        "jax_threefry_partitionable",
    ):
        found[name] = str(getattr(jax.config, name))
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        for flag in os.environ.get(variable, "").split():
            key, _, value = flag.partition("=")
            if not key.startswith(PROCESS_FLAGS):
                found[f"{variable} {key}"] = value or "(given)"
    return found
