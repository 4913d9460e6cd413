"""JAX function -> StableHLO module, on no device at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    platform: str,
    static_argnums: Sequence[int] = (),
) -> tuple[Any, Any]:
    """Traces `fn` at the given arguments and lowers it for `platform`, whole and unpartitioned.

    Args:
      fn: a function of pytrees.
      args: arrays or `jax.ShapeDtypeStruct`s, static arguments as they are.
      platform: `cpu`, `cuda`, `tpu`.
      static_argnums: which arguments are static.

    Returns:
      The MLIR module and the result's pytree of `ShapeDtypeStruct`s.
    """
    jitted = jax.jit(fn, static_argnums=tuple(static_argnums), keep_unused=True)
    traced = jitted.trace(*args)
    lowered = traced.lower(lowering_platforms=(platform,))
    return lowered.compiler_ir("stablehlo"), lowered.out_info
