"""`Problem`: all that a plan has to respect and may choose at the boundary of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from spmd.ir.control_flow import Index
from spmd.ir.program import Op, Program, Value
from spmd.ir.types import TensorType, local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Mark, Sharding, is_even
from spmd.mesh.topology import Topology
from spmd.predict.backends import XlaBackend
from spmd.predict.fusion import Fused
from spmd.propagation.propagate import Propagated, propagate
from spmd.propagation.sink import cheap_values
from spmd.reshard.paths import Resharder, States, Table


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be planned."""

    propagated: Propagated
    topology: Topology
    # For each argument the shardings that it may have, first what the marks suggest.
    arguments: tuple[States, ...]
    results: tuple[Sharding | None, ...]  # what the user asked for, or None
    links: Mapping[int, int]  # result -> argument: updates of donated arguments, sharded alike
    _bytes: dict[TensorType, dict[Sharding, int]] = field(default_factory=dict, init=False)

    @property
    def program(self) -> Program:
        """The global program."""
        return self.propagated.program

    @property
    def index(self) -> Index:
        """Lookups over the program."""
        return self.propagated.index

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.propagated.mesh

    @cached_property
    def resharder(self) -> Resharder:
        """What reshards cost."""
        return Resharder(self.index, self.mesh, self.topology)

    @cached_property
    def wishes(self) -> tuple[Sharding | None, ...]:
        """What propagation proposed for each value, if anything; equal ones are one object."""
        proposals = self.propagated.proposals
        made = {dims: Sharding(dims) if any(dims) else None for dims in dict.fromkeys(proposals)}
        return tuple([made[dims] for dims in proposals])

    @cached_property
    def in_memory(self) -> tuple[bool, ...]:
        """Whether each value is in memory, under whichever name, if nothing is resharded."""
        fused, producers = Fused(self.program, XlaBackend()), self.index.producers
        found = []
        for root in fused.root:
            while fused.root[root] != root:
                root = fused.root[root]
            found.append(fused.stored[root] or root not in producers)
        return tuple(found)

    def stored(self, op: Op) -> tuple[bool, ...]:
        """For each operand and result of an op whether it is in memory."""
        return tuple([self.in_memory[v] for v in (*op.operands, *op.results)])

    def bytes(self, value: Value, states: States) -> list[int]:
        """Bytes that one device holds of a value in each state."""
        type_ = self.program.types[value]
        known = self._bytes.setdefault(type_, {})
        for state in states:
            if state not in known:
                known[state] = local_type(type_, state, self.mesh).bytes
        return [known[state] for state in states]

    def size(self, value: Value, state: Sharding) -> int:
        """Bytes that one device holds of a value in one state."""
        return self.bytes(value, (state,))[0]

    def traffic(
        self, value: Value, states: States, needs: States, sends: Any, stores: bool
    ) -> Table:
        """Seconds in which reshards from some states (rows) to some needs (columns) move memory.

        Their collectives' time is counted elsewhere. What a collective `sends` of a value that is
        computed inside its readers is written for it, and read behind it; and so is a piece that is
        cut out for a reader that `stores` it, that is, wants it in memory.
        """
        bandwidth = self.topology.hbm_bandwidth
        got = np.array(self.bytes(value, needs)) / bandwidth
        found = np.zeros((len(states), len(needs)))
        if not self.in_memory[value]:
            sent = np.array(self.bytes(value, states)) / bandwidth
            found += np.where(sends, sent[:, None] + got, 0.0)
        if stores:
            have, wanted = (np.array(list(map(id, ends))) for ends in (states, needs))
            found += np.where((have[:, None] != wanted) & ~np.asarray(sends), 2 * got, 0.0)
        return found

    def suggested(self, value: Value) -> Sharding:
        """How an argument lies in memory between calls if it lies as the marks suggest.

        It is split over whole axes, and over the parts of axes that it is marked with: jax cannot
        name other parts.
        """
        mark = self.propagated.marks.get(value)
        shape = self.program.types[value].shape
        proposal = self.propagated.proposals[value]
        return Sharding(whole_axes(proposal, shape, self.mesh, mark.dims if mark else ()))

    def left(self, value: Value, state: Sharding) -> Sharding:
        """How a result without a given sharding lies in memory: as its producer leaves it.

        A partial one is added up in the sharding to which that takes the least time. Parts of axes,
        which jax cannot name, are gathered. A result that is marked inside of the program, some
        dims open, lies as is proposed.
        """
        if value in self.propagated.marks:
            return self.suggested(value)
        type_ = self.program.types[value]
        if state.partial:
            ways = every_state(type_, self.mesh)
            seconds = self.resharder.table(value, (state,), ways)[0]
            return min(zip(seconds, ways, strict=True), key=lambda way: way[0])[1]
        return Sharding(whole_axes(state.dims, type_.shape, self.mesh))


def posed(
    program: Program,
    mesh: Mesh,
    marks: Mapping[Value, Mark],
    topology: Topology,
    results: Sequence[Sharding | None],
    links: Sequence[tuple[int, int]],
) -> Problem:
    """What is to be planned: a program in which axes flow from the marks to all other values.

    An argument without a mark may be split in any way. For each result, `results` has the sharding
    that the user asked for, or None; `links` are (result, argument) of updates of donated
    arguments.
    """
    args, made = program.body.args, program.body.results
    pairs = [(made[result], args[argument]) for result, argument in links]
    propagated = propagate(program, mesh, marks, cheap_values(program), pairs)
    problem = problem_of(propagated, topology, results, links)
    return opened(problem, [value not in marks for value in args])


def problem_of(
    propagated: Propagated,
    topology: Topology,
    results: Sequence[Sharding | None] = (),
    links: Sequence[tuple[int, int]] = (),
) -> Problem:
    """The problem in which every argument is as marked, else as proposed (see `posed`)."""
    body = propagated.program.body
    wanted = tuple(results) or (None,) * len(body.results)
    problem = Problem(propagated, topology, (), wanted, dict(links))
    arguments = tuple((problem.suggested(v),) for v in body.args)
    return replace(problem, arguments=arguments)


def opened(problem: Problem, free: Sequence[bool]) -> Problem:
    """The same problem, but the arguments that are `free` may lie in every way that divides them.

    Donated ones, which live on from call to call, lie in no larger pieces than the marks suggest.
    """
    types, values = problem.program.types, problem.program.body.args
    arguments = list(problem.arguments)
    for i, value in enumerate(values):
        if free[i]:
            every = every_state(types[value], problem.mesh)
            if i in problem.links.values():
                pieces = problem.mesh.extent(arguments[i][0].used)
                every = tuple(s for s in every if problem.mesh.extent(s.used) >= pieces)
            arguments[i] = tuple(dict.fromkeys((*arguments[i], *every)))
    return replace(problem, arguments=tuple(arguments))


def every_state(type_: TensorType, mesh: Mesh) -> States:
    """Every way to split a value's dims over whole axes that divide them, the finest first."""
    axes = [atoms for atoms in mesh.axis_atoms.values() if atoms]
    found = laid(type_, ((),) * type_.rank, axes, mesh)
    return tuple(sorted(found, key=lambda s: -len(s.used)))


def laid(type_: TensorType, dims: Sequence[Axes], runs: Sequence[Axes], mesh: Mesh) -> States:
    """Every way to lay runs of atoms on dims that they divide, behind what is there, or nowhere."""
    found = laid_out(dims, runs, lambda d, axes: is_even(type_.shape[d], axes, mesh))
    return tuple([Sharding(each) for each in found])


def laid_out(
    start: Sequence[Axes], runs: Sequence[Axes], fits: Callable[[int, Axes], bool]
) -> list[tuple[Axes, ...]]:
    """Every way to append each of some runs to one of some places that it fits, or to none."""
    found = [tuple(start)]
    for atoms in runs:
        found += [
            (*have[:place], have[place] + atoms, *have[place + 1 :])
            for have in found
            for place in range(len(have))
            if fits(place, have[place] + atoms)
        ]
    return found


def whole_axes(
    dims: Sequence[Axes], shape: Sequence[int], mesh: Mesh, promised: Sequence[Axes] = ()
) -> tuple[Axes, ...]:
    """The longest part of each dim's atoms that is whole axes and divides it, as boundaries ask.

    Atoms that a mark has `promised` for a dim are kept where they divide it.
    """
    kept = []
    for axes, size, begins in zip(dims, shape, promised or ((),) * len(dims), strict=True):
        done: Axes = begins if is_even(size, begins, mesh) else ()
        while rest := axes[len(done) :]:
            axis = mesh.axis_atoms[mesh.axis_names[mesh.atoms[rest[0]].axis]]
            if rest[: len(axis)] != axis or not is_even(size, done + axis, mesh):
                break
            done += axis
        kept.append(done)
    return tuple(kept)
