"""`Problem`: all that a plan has to respect and may choose at the boundary of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.mesh.sharding import Sharding, replicated
from spmd.mesh.topology import Topology
from spmd.planning.walk import boundary
from spmd.propagation.propagated import Propagated


class Problem(NamedTuple):
    """What is to be planned.

    Attributes:
      propagated: the program with its proposals.
      topology: the machine to cost on.
      arguments: for each argument the shardings that it may have.
      results: for each result, the sharding that the user asked for, or None.
      links: result -> argument of donated arguments and their updates, which look alike.
    """

    propagated: Propagated
    topology: Topology
    arguments: tuple[tuple[Sharding, ...], ...]
    results: tuple[Sharding | None, ...]
    links: Mapping[int, int]


def problem_of(
    propagated: Propagated,
    topology: Topology,
    result_marks: Sequence[Sharding | None] = (),
    links: Sequence[tuple[int, int]] = (),
) -> Problem:
    """The problem in which every argument is as marked, else as proposed.

    Args:
      propagated: the program with its proposals.
      topology: the machine to cost on.
      result_marks: for each result, the sharding that the user asked for, or None.
      links: (result, argument) of donated arguments and their updates.
    """
    body, types = propagated.program.body, propagated.program.types
    arguments = tuple((boundary(propagated, v, replicated(types[v].rank)),) for v in body.args)
    marks = tuple(result_marks) or (None,) * len(body.results)
    return Problem(propagated, topology, arguments, marks, dict(links))
