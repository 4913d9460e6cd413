"""Programs imported from jitted functions."""

from collections.abc import Callable
from typing import Any

import jax

from spmd.frontend.importer.module import import_module
from spmd.ir.program import Program


def stablehlo(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A function's StableHLO module, lowered for a CPU."""
    traced = jax.jit(fn, keep_unused=True, **options).trace(*args)
    return traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")


def program_of(fn: Callable[..., Any], *args: Any) -> Program:
    return import_module(stablehlo(fn, *args)).program
