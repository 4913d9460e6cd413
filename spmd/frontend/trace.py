"""JAX function -> StableHLO module, on no device at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from spmd.mesh.mesh import Mesh

seen_meshes: list[Mesh] = []
"""Meshes of the marks met while tracing, in order; `jit` without a mesh takes the first."""


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    platform: str,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Traces `fn` at the given arguments and lowers it for `platform`, whole and unpartitioned.

    Args:
      fn: a function of pytrees.
      args, kwargs: `jax.ShapeDtypeStruct`s, static arguments as they are.
      platform: `cpu`, `cuda`, `tpu`.
      static_argnums, static_argnames: which arguments are static.

    Returns:
      The MLIR module and the result's pytree of `ShapeDtypeStruct`s.
    """
    jitted = jax.jit(
        fn,
        static_argnums=tuple(static_argnums),
        static_argnames=tuple(static_argnames),
        keep_unused=True,
    )
    traced = jitted.trace(*args, **kwargs)
    lowered = traced.lower(lowering_platforms=(platform,))
    return lowered.compiler_ir("stablehlo"), lowered.out_info
