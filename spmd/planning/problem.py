"""`Problem`: the input of a planner, with the shardings that arguments and results may have."""

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
    """What a planner is given: proposals, the machine, and shardings for arguments and results."""

    propagated: Propagated
    topology: Topology
    # For each argument the shardings that it may have, first what the marks suggest.
    arguments: tuple[States, ...]
    results: tuple[Sharding | None, ...]  # what the user asked for, or None
    links: Mapping[int, int]  # result -> argument: updates of donated arguments, sharded alike
    _bytes: dict[TensorType, dict[Sharding, int]] = field(default_factory=dict, init=False)

    @property
    def program(self) -> Program:
        """The program to be planned: the global one, of which no value is split yet."""
        return self.propagated.program

    @property
    def index(self) -> Index:
        """Lookups over the program: producers, users, trip counts and held atoms."""
        return self.propagated.index

    @property
    def mesh(self) -> Mesh:
        """The mesh over whose axes values are split."""
        return self.propagated.mesh

    @cached_property
    def resharder(self) -> Resharder:
        """The object that finds the cheapest reshards of the program's values."""
        return Resharder(self.index, self.mesh, self.topology)

    @cached_property
    def wishes(self) -> tuple[Sharding | None, ...]:
        """For each value the sharding that propagation proposes; None if that splits nothing."""
        proposals = self.propagated.proposals
        made = {dims: Sharding(dims) if any(dims) else None for dims in dict.fromkeys(proposals)}
        return tuple([made[dims] for dims in proposals])

    @cached_property
    def in_memory(self) -> tuple[bool, ...]:
        """For each value whether it, or what it aliases, is stored (arguments are), not fused."""
        fused, producers = Fused(self.program, XlaBackend()), self.index.producers
        homes = map(fused.home, range(len(fused.root)))
        return tuple([fused.stored[home] or home not in producers for home in homes])

    def stored(self, op: Op) -> tuple[bool, ...]:
        """Returns for each operand, then each result of an op whether it is stored in memory."""
        return tuple([self.in_memory[v] for v in (*op.operands, *op.results)])

    def bytes(self, value: Value, states: States) -> list[int]:
        """Returns the bytes that one device holds of a value in each state."""
        type_ = self.program.types[value]
        known = self._bytes.setdefault(type_, {})
        for state in states:
            if state not in known:
                known[state] = local_type(type_, state, self.mesh).bytes
        return [known[state] for state in states]

    def traffic(
        self, value: Value, states: States, needs: States, sends: Any, stores: bool
    ) -> Table:
        """Returns a table of the seconds of reshards' memory traffic outside of collectives.

        Rows are the `states` before, columns the `needs` after. A value that is fused into its
        readers is written where `sends`, a table of bools, says that it is sent, and what arrives
        is read; a slice is written and read if the reader needs it in memory (`stores`).
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
        """Returns the sharding that the marks suggest for a value at the program's boundary.

        It splits over whole axes, and over the parts of axes that the value is marked with: jax
        cannot name other parts.
        """
        mark = self.propagated.marks.get(value)
        shape = self.program.types[value].shape
        proposal = self.propagated.proposals[value]
        return Sharding(whole_axes(proposal, shape, self.mesh, mark.dims if mark else ()))

    def left(self, value: Value, state: Sharding) -> Sharding:
        """Returns the sharding in which a result is returned for which the user gave none.

        It is the value's `state` with parts of axes gathered, which jax cannot name. A partial
        state is reduced into the sharding to which that takes the least time. A value that is
        marked inside the program is as suggested.
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
    """Returns the problem of a program: marks are propagated, arguments without one are left open.

    An open one may be split in any way. For each result, `results` has the sharding that the user
    asked for, or None; `links` has (result, argument), by position, of donated arguments' updates.
    """
    args, made = program.body.args, program.body.results
    pairs = [(made[result], args[argument]) for result, argument in links]
    propagated = propagate(program, mesh, marks, cheap_values(program), pairs)
    problem = Problem(propagated, topology, (), tuple(results), dict(links))
    return opened(problem, [value not in marks for value in args])


def opened(problem: Problem, free: Sequence[bool]) -> Problem:
    """Returns the problem with `free` arguments allowed every sharding that keeps their marks.

    `free` says for each argument whether it may; others have only the one that the marks suggest.
    Donated ones, which live on from call to call, are in no larger pieces than the marks suggest.
    """
    types, mesh, marks = problem.program.types, problem.mesh, problem.propagated.marks
    arguments: list[States] = []
    for i, (value, is_free) in enumerate(zip(problem.program.body.args, free, strict=True)):
        suggested = problem.suggested(value)
        every = every_state(types[value], mesh, marks.get(value)) if is_free else ()
        if i in problem.links.values():
            pieces = mesh.extent(suggested.used)
            every = tuple(s for s in every if mesh.extent(s.used) >= pieces)
        arguments.append(tuple(dict.fromkeys((suggested, *every))))
    return replace(problem, arguments=tuple(arguments))


def every_state(type_: TensorType, mesh: Mesh, mark: Mark | None = None) -> States:
    """Returns every split of a value's dims over whole axes that divide them, the finest first.

    With a mark, those that split dims as it says, open ones over further axes, too.
    """
    dims, is_open, _ = mark or (((),) * type_.rank, (True,) * type_.rank, "")
    used = {atom for axes in dims for atom in axes}
    runs = [atoms for atoms in mesh.axis_atoms.values() if atoms and used.isdisjoint(atoms)]
    found = laid_out(dims, runs, lambda d, axes: is_open[d] and is_even(type_.shape[d], axes, mesh))
    return tuple(sorted(map(Sharding, found), key=lambda s: -len(s.used)))


def laid_out(
    start: Sequence[Axes], runs: Sequence[Axes], fits: Callable[[int, Axes], bool]
) -> list[tuple[Axes, ...]]:
    """Returns all ways to append each run to an entry of `start` that it `fits`, or to none."""
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
    """Returns the leading atoms of each dim that are whole axes and divide it, as jax needs them.

    Atoms in `promised`, which the user marked a dim with, are kept where they divide it.
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
