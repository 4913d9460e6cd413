"""Ahead-of-time compilation: describes devices that this machine lacks, for XLA to compile for.

The package `libtpu` has XLA's compiler for TPUs, jax's CUDA plugin the one for NVIDIA GPUs. Both
run on any Linux machine. Without a GPU, XLA does not time kernels to choose the fastest.
"""

import importlib.util
import math
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from spmd.errors import MeshError
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import platform_of
from spmd.mesh.topology import Topology

_FIGURES = (
    "core_count", "fpus_per_core", "shared_memory_per_core", "l2_cache_size", "device_memory_size",
    "memory_bandwidth", "clock_rate_ghz",
)  # fmt: skip
"""Figures of a GPU as XLA names them: numbers of multiprocessors and of their float32 units, bytes,
bytes a second."""

# From the CUDA programming guide's table of compute capabilities, and NVIDIA's architecture papers.
_GPUS = {
    "a100": (
        "NVIDIA A100-SXM4-80GB", 8, (108, 64, 164 << 10, 40 << 20, 80 << 30, 2_039 * 10**9, 1.41),
    ),
    "h100": (
        "NVIDIA H100 80GB HBM3", 9, (132, 128, 228 << 10, 50 << 20, 80 << 30, 3_352 * 10**9, 1.98),
    ),
    "h200": (
        "NVIDIA H200", 9, (132, 128, 228 << 10, 60 << 20, 141 * 10**9, 4_800 * 10**9, 1.98),
    ),
}  # fmt: skip
"""Chip -> CUDA's name for it, its compute capability (before the point), its `_FIGURES`."""

RESERVED = 1 << 10  # bytes of shared memory that CUDA keeps of every block


def _target(chip: str) -> str:
    """Returns XLA's description of a GPU as a compilation target: a protobuf in text format."""
    name, major, numbers = _GPUS[chip]
    said = dict(zip(_FIGURES, numbers, strict=True))
    said["shared_memory_per_block_optin"] = said["shared_memory_per_core"] - RESERVED
    figures = "\n  ".join(f"{field}: {number}" for field, number in said.items())
    return f"""
gpu_device_info {{
  {figures}
  shared_memory_per_block: {48 << 10}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 }}
"""


CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")

SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""Environment variable; if it is 1, jax's CUDA plugin starts without cuDNN and other libraries."""

_CHIP_CONFIG = {"v4": "megacore"}  # chips whose two cores are one device only if libtpu is told so


def is_here(mesh: Mesh, topology: Topology) -> bool:
    """Whether jax sees all devices of the mesh, and the topology has their platform or none."""
    return mesh.is_here and topology.platform in (None, platform_of(mesh))


def devices_ahead(mesh: Mesh, topology: Topology) -> list[Any]:
    """Returns jax descriptions of a topology's devices, in the mesh's order, to compile for.

    A mesh of GPUs has as many devices as the topology, one of TPUs a multiple (several slices).
    Raises MeshError if the number does not fit, or nothing here compiles for the topology.
    """
    is_tpu, chip = topology.platform == "tpu", topology.name.partition(":")[0]
    if not is_tpu and (topology.platform != "cuda" or chip not in _GPUS):
        raise MeshError(
            f"XLA's compiler for {topology} is only where such devices are",
            actual="they are not visible here",
            fix="plan without compiling: use .lower(..., topology=...) instead of .compile(...)",
        )
    slices, rest = divmod(mesh.size, topology.count)
    if rest or not slices or (slices > 1 and not is_tpu):
        several = ", or as many in each of several slices" if is_tpu else ""
        raise MeshError(
            f"the mesh ({mesh}) does not fit {topology}",
            actual=f"{mesh.size} devices",
            required=f"{topology.count} devices{several}",
            fix="change the mesh or the topology",
        )
    devices = _tpus(topology, slices) if is_tpu else _gpus(topology, chip)
    # Mesh axes onto torus dims, as `make_mesh` lays out devices that are here.
    if math.prod(mesh.dcn_sizes) > 1:
        inner = [n // m for n, m in zip(mesh.sizes, mesh.dcn_sizes, strict=True)]
        array = mesh_utils.create_hybrid_device_mesh(inner, mesh.dcn_sizes, devices)
    else:
        array = mesh_utils.create_device_mesh(mesh.sizes, devices, allow_split_physical_axes=True)
    return list(np.asarray(array).flat)


def _tpus(topology: Topology, slices: int) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise _not_installed(topology, "libtpu", "tpu")
    if jax.default_backend() != "tpu":  # no chip is touched: several may compile at once
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
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


def _gpus(topology: Topology, chip: str) -> list[Any]:
    hosts = -(-topology.count // topology.chip.per_host)
    if topology.count % hosts:
        raise MeshError(
            f"{topology} cannot be described to XLA, whose hosts have equally many devices",
            actual=f"{topology.count} devices on {hosts} hosts",
            required=f"a multiple of {hosts} devices",
            fix="change the topology, or plan without compiling: use .lower(..., topology=...)",
        )
    if not any(importlib.util.find_spec(name) for name in CUDA_PLUGINS):
        raise _not_installed(topology, "jax's plugin for CUDA", "cuda")
    try:
        described = topologies.get_topology_desc(
            topology.name,
            "cuda",
            target_config=_target(chip),
            topology=f"1x{hosts}x{topology.count // hosts}",
        )
    except NotImplementedError as error:  # the plugin looked for CUDA's libraries
        raise MeshError(
            f"jax's plugin for CUDA did not start, so nothing can be compiled for {topology}",
            fix=f"set {SKIP_CHECK}=1 before Python starts, or install CUDA's libraries",
        ) from error
    return list(described.devices)


def _not_installed(topology: Topology, what: str, extra: str) -> MeshError:
    instead = "plan without compiling: use .lower(..., topology=...)"
    return MeshError(
        f"compiling for {topology} takes {what}, which is not installed",
        fix=f'pip install "spmd[{extra}]", or {instead}',
    )
