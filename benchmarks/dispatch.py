r"""What a call of a compiled program costs, beside `jax.jit` of the same function.

For each number of leaves both programs add 1 to each of as many small arrays. They take turns; a
time is the shortest of several rounds, from the call until it returns (results may still be under
way).

Example:
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu benchmarks/run dispatch
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser

ROUNDS = 9


def seconds_a_call(fn: Any, arrays: list[Any], calls: int) -> float:
    """One round: as many calls in a row."""
    begin = time.perf_counter()
    for _ in range(calls):
        results = fn(arrays)
    taken = time.perf_counter() - begin
    jax.block_until_ready(results)
    return taken / calls


def add_one(arrays: list[Any]) -> list[Any]:
    """The program."""
    return [array + 1 for array in arrays]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    Parser("benchmarks/run dispatch", __doc__).parse_args(arguments)
    mesh = spmd.make_mesh(data=jax.device_count())
    print(f"jax {jax.__version__}, {mesh.size} x {jax.devices()[0].device_kind}")
    print_head(("leaves", "jax.jit, us", "spmd.jit, us", "ratio"))
    for leaves in (1, 100, 1000):
        arrays = [spmd.mark_sharding(jnp.ones(8), mesh, ("data",)) for _ in range(leaves)]
        both = jax.jit(add_one), spmd.jit(add_one, mesh=mesh)
        best = [float("inf")] * 2
        for _ in range(ROUNDS):
            for i, fn in enumerate(both):
                best[i] = min(best[i], seconds_a_call(fn, arrays, max(5, 2000 // leaves)))
        theirs, ours = (1e6 * seconds for seconds in best)
        print_line([str(leaves), f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}"])
