"""`spmd`: a sharding compiler for JAX. Mark a few tensors; it shards the rest of the program."""

from spmd import explain, ops
from spmd.api import (
    Compiled,
    Jitted,
    Lowered,
    compile_stablehlo,
    jit,
    lower_stablehlo,
    mark_sharding,
    mark_tree,
    pipeline,
)
from spmd.auto import AutoSharding, auto
from spmd.errors import (
    ArgumentError,
    FrontendError,
    InstallError,
    LaunchError,
    LegalityError,
    MeshError,
    PlanError,
    SpecError,
    SpmdError,
    UnsupportedOpError,
)
from spmd.launch.initialize import initialize
from spmd.lowering.register import register_composite, register_rule
from spmd.mesh.make import HybridMesh, make_mesh
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import OPEN
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.plan import Plans, Task, plan
from spmd.transfer import TransferPlan, transfer

__version__ = "0.1.0"

__all__ = [
    "OPEN", "ArgumentError", "AutoSharding", "Compiled", "FrontendError", "HybridMesh",
    "InstallError", "Jitted", "LaunchError", "LegalityError", "Lowered", "Mesh", "MeshError",
    "Options", "PlanError", "Plans", "SpecError", "SpmdError", "Task", "Topology", "TransferPlan",
    "UnsupportedOpError", "auto", "compile_stablehlo", "explain", "initialize", "jit",
    "lower_stablehlo", "make_mesh", "mark_sharding", "mark_tree", "ops", "pipeline", "plan",
    "register_composite", "register_rule", "transfer",
]  # fmt: skip
