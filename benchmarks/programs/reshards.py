"""From one sharding to another: every pair of shardings of a matrix on 4 x 2, and some more."""

from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Any

import jax.numpy as jnp

import spmd
from benchmarks.programs.program import MESHES, Built, Program, marked

# Large enough for bytes, not the number of messages, to decide how a plan goes.
SIZE, UNEVEN, BOX = (1024, 1024), (510, 516), (64, 128, 256)

Spec = tuple[tuple[str, ...], ...]
"""Of each dim the axes that it is split over, major to minor."""

BOXES: tuple[tuple[Spec, Spec], ...] = (
    ((("data",), (), ()), ((), (), ("data", "model"))),
    ((("data",), (), ("model",)), ((), (), ("data", "model"))),
    ((("data",), (), ("model",)), ((), ("data",), ("model",))),
    ((("data",), ("model",), ()), ((), ("data",), ("model",))),
    ((("data",), ("model",), ()), (("model",), (), ("data",))),
    ((("data", "model"), (), ()), ((), ("model",), ("data",))),
)
"""Pairs of shardings of a value with three dims."""

UNEVEN_PAIRS: tuple[tuple[Spec, Spec], ...] = (
    ((("model",), ("data",)), (("data",), ("model",))),
    ((("model",), ()), (("data",), ())),
    (((), ("data",)), (("data",), ())),
    ((("model",), ("data",)), (("data", "model"), ())),
)
"""Pairs on which 4 does not divide 510 in the second sharding, while all divides in the first."""


def reshard_programs() -> list[Program]:
    """One program for each pair."""
    pairs: list[tuple[str, tuple[int, ...], Spec, Spec]] = [
        ("reshard", SIZE, src, dst) for src, dst in permutations(matrix_specs(), 2)
    ]
    pairs += [("reshard", BOX, *pair) for pair in BOXES]
    pairs += [("reshard-uneven", UNEVEN, *pair) for pair in UNEVEN_PAIRS]
    return [
        Program(
            f"{family}/{describe(src)}->{describe(dst)}",
            MESHES["4x2"],
            partial(build, shape=shape, src=src, dst=dst, and_back=shape == UNEVEN),
        )
        for family, shape, src, dst in pairs
    ]


def matrix_specs() -> Iterator[Spec]:
    """Every sharding of two dims over two axes, an axis unused, alone or beside the other."""
    for order in (("data",), ("model",), ("data", "model"), ("model", "data"), ()):
        if len(order) == 2:
            yield (order[:1], order[1:])
        if order:
            yield (order, ())
        yield ((), order)


def describe(spec: Spec) -> str:
    """`(dm,-)`: the axes of each dim by their first letters."""
    return "(" + ",".join("".join(a[0] for a in axes) or "-" for axes in spec) + ")"


def build(
    mesh: spmd.Mesh, shape: tuple[int, ...], src: Spec, dst: Spec, and_back: bool = False
) -> Built:
    """`mark(mark(x, src), dst)`; perhaps and back: what doesn't divide may not leave a program."""

    def reshard(x: Any) -> Any:
        there = spmd.mark_sharding(spmd.mark_sharding(x, mesh, src), mesh, dst)
        return spmd.mark_sharding(jnp.sin(there), mesh, src) if and_back else there

    return Built(reshard, (marked(mesh, src, shape),))
