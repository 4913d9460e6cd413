"""What the kernels for Triton have in common."""

from __future__ import annotations

from typing import Any


def triton() -> Any:
    """Imports Pallas's Triton backend on its first use, since that takes long."""
    from jax.experimental.pallas import triton as backend

    return backend


def compiled_with(warps: int, stages: int, interpret: bool) -> dict[str, Any]:
    """Returns the arguments of a `pallas_call` that compile it, or run it step by step in jax."""
    if interpret:
        return {"interpret": True}
    return {"compiler_params": triton().CompilerParams(num_warps=warps, num_stages=stages)}


def power_above(n: int) -> int:
    """Returns the least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()
