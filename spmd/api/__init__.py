"""The public functions: marks, `jit` with its lowered and compiled programs, and modules.

A call passes through `marks` (shardings that users give) -> `arguments` (names, donation and specs
of arguments) -> `tracing` (the compiler's input) -> `planned` (reports about a plan) -> `compiled`
(running it); users call `jitted` and `stablehlo`. Other packages import from here alone.
"""

from spmd.api.arguments import Selected, like_parameters
from spmd.api.compiled import Compiled, Lowered
from spmd.api.jitted import Front, Jitted, jit, with_keywords
from spmd.api.marks import argument_error, caller, mark_sharding, mark_tree, path_name
from spmd.api.pipelined import pipeline
from spmd.api.planned import STAGES
from spmd.api.stablehlo import compile_stablehlo, lower_stablehlo, module_request, static_module

__all__ = [
    "STAGES", "Compiled", "Front", "Jitted", "Lowered", "Selected", "argument_error", "caller",
    "compile_stablehlo", "jit", "like_parameters", "lower_stablehlo", "mark_sharding", "mark_tree",
    "module_request", "path_name", "pipeline", "static_module", "with_keywords",
]  # fmt: skip
