"""Ahead of time: the devices of a machine that is not here, for XLA to compile for.

`libtpu` holds XLA's whole compiler for TPUs and runs on any Linux machine; the other backends
compile only where their devices are.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from spmd.errors import MeshError
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import has_devices, jax_mesh
from spmd.mesh.topology import Topology

_CHIP_CONFIG = {"v4": "megacore"}
"""Chips whose two cores are one device only if libtpu is told so."""


def is_here(mesh: Mesh, topology: Topology) -> bool:
    """Whether the mesh's devices are visible and of the topology's platform."""
    if not has_devices(mesh):
        return False
    platform = str(jax_mesh(mesh).devices.flat[0].platform)
    return topology.platform in (None, platform.replace("gpu", "cuda"))


def devices_ahead(mesh: Mesh, topology: Topology) -> list[Any]:
    """Descriptions of a TPU machine's devices, in the mesh's order: to compile for, not to run on.

    Args:
      mesh: as many devices as the topology has, or a multiple of it: as many slices.
      topology: of a TPU.

    Raises:
      MeshError: no compiler for the machine is here, or the mesh does not fit it.
    """
    if topology.platform != "tpu":
        raise MeshError(
            f"XLA's compiler for {topology} is only where such devices are",
            actual="they are not visible here",
            fix="plan without compiling: use .lower(..., topology=...) instead of .compile(...)",
        )
    if importlib.util.find_spec("libtpu") is None:
        raise MeshError(
            f"compiling for {topology} takes libtpu, which is not installed",
            fix='pip install "spmd[tpu]", or plan without compiling: use .lower(..., topology=...)',
        )
    slices, rest = divmod(mesh.size, topology.count)
    if rest or not slices:
        raise MeshError(
            f"the mesh ({mesh}) does not fit {topology}",
            actual=f"{mesh.size} devices",
            required=f"{topology.count} devices, or as many in each of several slices",
            fix="change the mesh or the topology",
        )
    if jax.default_backend() != "tpu":  # no chip is touched: several may compile at once
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return _in_mesh_order(mesh, _described(topology, slices))


def _described(topology: Topology, slices: int) -> list[Any]:
    """The devices as libtpu describes them."""
    kind, _, shape = topology.name.partition(":")
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if kind in _CHIP_CONFIG:
        options["chip_config_name"] = _CHIP_CONFIG[kind]
    host = (*(math.gcd(2, size) for size in topology.shape[:2]), 1)
    if host != (2, 2, 1):  # a host has 2 x 2 chips where the shape allows it
        options["chips_per_host_bounds"] = host
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{kind}:{shape}", **options
    )
    return list(described.devices)


def _in_mesh_order(mesh: Mesh, devices: list[Any]) -> list[Any]:
    """Mesh axes onto torus dims, as `make_mesh` lays out devices that are here."""
    if math.prod(mesh.dcn_sizes) > 1:
        inner = [n // m for n, m in zip(mesh.sizes, mesh.dcn_sizes, strict=True)]
        array = mesh_utils.create_hybrid_device_mesh(inner, mesh.dcn_sizes, devices)
    else:
        array = mesh_utils.create_device_mesh(mesh.sizes, devices, allow_split_physical_axes=True)
    return list(np.asarray(array).flat)
