"""Ops that no program to be partitioned may contain, each with the reason and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from spmd.errors import UnsupportedOpError
from spmd.ir.program import Loc


class Refusal(NamedTuple):
    """Why an op is refused, and what to write instead."""

    reason: str
    fix: str


_REFUSALS: Mapping[Refusal, tuple[str, ...]] = {
    Refusal(
        "it is written for one device among several, and is outside any jax.shard_map",
        "leave it out, and let the marks place the collectives; or put it into jax.shard_map",
    ): (
        "stablehlo.all_gather",
        "stablehlo.all_reduce",
        "stablehlo.all_to_all",
        "stablehlo.collective_broadcast",
        "stablehlo.collective_permute",
        "stablehlo.partition_id",
        "stablehlo.reduce_scatter",
        "stablehlo.replica_id",
    ),
    Refusal(
        "it says what becomes of one device's piece",
        "compile the program as one device would run it, and let the marks place the collectives",
    ): ("stablehlo.collective_reduce", "stablehlo.cross-replica-sum"),
    Refusal(
        "it is not beside a call of one device's program, as jax.shard_map writes it",
        "lower the program with jax_use_shardy_partitioner=True, or leave the region out",
    ): ("custom_call:SPMDFullToShardShape", "custom_call:SPMDShardToFullShape"),
    Refusal(
        "it talks to the host or to another program while it runs",
        "pass the data as arguments and results",
    ): ("stablehlo.infeed", "stablehlo.outfeed", "stablehlo.recv", "stablehlo.send"),
    Refusal(
        "tokens order side effects, which every device would repeat",
        "compile the jax function itself with spmd.jit, which keeps its callbacks in order; or "
        "export it without (jax.debug.print(ordered=True), io_callback(ordered=True), ...)",
    ): ("stablehlo.after_all", "stablehlo.create_token"),
    Refusal(
        "asynchronous ops hold their operands across others",
        "compile the program before its collectives were split into start and done",
    ): ("stablehlo.async_done", "stablehlo.async_start"),
    Refusal(
        "its numbers come from a generator of each device's own, so the devices would disagree",
        "use jax.random, or stablehlo.rng_bit_generator with an explicit state",
    ): ("stablehlo.rng",),
    Refusal(
        "it calls back into Python, and the module only points to the function in the process "
        "that made it",
        "compile the jax function itself with spmd.jit, which runs its callbacks; or export it "
        "without (jax.debug.print, jax.pure_callback, jax.experimental.io_callback)",
    ): (
        "custom_call:spmd.callback",
        "custom_call:xla_ffi_partitioned_python_cpu_callback",
        "custom_call:xla_ffi_partitioned_python_gpu_callback",
        "custom_call:xla_ffi_python_cpu_callback",
        "custom_call:xla_ffi_python_gpu_callback",
        "custom_call:xla_python_cpu_callback",
        "custom_call:xla_python_gpu_callback",
    ),
    Refusal(
        "the module only points to what it computes, which is Python in the process that made it",
        "compile the jax function itself with spmd.jit, which inlines jax.custom_partitioning",
    ): ("custom_call:CustomSPMDPartitioning",),
    Refusal(
        "quantized element types are unknown to jaxlib's MLIR",
        "write the scale and the zero point out as arithmetic on integers",
    ): ("stablehlo.uniform_dequantize", "stablehlo.uniform_quantize"),
}

REFUSED: Mapping[str, Refusal] = {
    name: refusal for refusal, names in _REFUSALS.items() for name in names
}
"""Op (or `custom_call:` and its target) -> why the importer refuses it."""


def refuse(name: str, loc: Loc) -> None:
    """Raises UnsupportedOpError if an op (`custom_call:` and its target) is in `REFUSED`."""
    refusal = REFUSED.get(name)
    if refusal is not None:
        raise UnsupportedOpError(
            f"{name} cannot be partitioned: {refusal.reason}",
            op=name,
            source=loc.source,
            fix=refusal.fix,
        )
