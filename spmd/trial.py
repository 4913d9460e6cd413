"""`Trial`: a plan brought down to one device, and what its program is predicted to take."""

from __future__ import annotations

import copy
from functools import cached_property

from spmd.ir.program import Program
from spmd.lowering.partition import Partitioned, partition
from spmd.lowering.recompute.recompute import has_pairs, recompute
from spmd.lowering.rewrites.ring import ring
from spmd.lowering.rewrites.schedule import Room, schedule
from spmd.lowering.rewrites.simplify import simplify
from spmd.options import Options
from spmd.planning.limit import bound_of
from spmd.planning.plan import Plan
from spmd.predict.backends import memory_for
from spmd.predict.memory import MemoryUse, peak_memory
from spmd.predict.timeline import Timeline, predict_timeline
from spmd.progress import Stopwatch


class Trial:
    """Partitions a plan for one device; predicts its time and memory when asked for."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        donated: tuple[int, ...],
        clock: Stopwatch,
        unpriced: Trial | None = None,
    ) -> None:
        if plan.byte_price and unpriced is None:
            unpriced = Trial(plan._replace(byte_price=0.0), options, donated, clock)
        self._options, self._donated, self.clock = options, donated, clock
        self._unpriced, self.plan = unpriced or self, plan
        self.partitioned: Partitioned = (
            unpriced.partitioned if unpriced else clock("partition", partition, plan)
        )
        program = simple = self._simple
        if plan.byte_price:
            args = plan.mesh, plan.topology, plan.byte_price, self._room.bytes, donated
            # Links are shared by all devices: what fits as it is sends no more than it has to.
            program, again = clock("recompute", lambda: recompute(simple, *args, self.is_short))
            self.plan = plan._replace(recomputed=again)
        self._schedule(program)

    @cached_property
    def _simple(self) -> Program:
        """The local program after the rewrites that come before recomputation (remat)."""
        if self._unpriced is not self:
            return self._unpriced._simple
        program, mesh, topology = self.partitioned.program, self.plan.mesh, self.plan.topology
        return self.clock("optimize", simplify, program, mesh, topology)

    @property
    def _room(self) -> Room:
        memory = memory_for(self.plan.topology, self._options.memory_limit)
        return Room(memory, tuple(self.plan.problem.links.values()))

    @property
    def collects(self) -> bool:
        """Whether a loop stacks values for a later loop, which could make them again."""
        return has_pairs(self._simple)

    @property
    def is_short(self) -> bool:
        """Whether the program without recomputation exceeds the memory."""
        return self._unpriced.bytes > self._room.bytes

    def _schedule(self, program: Program) -> None:
        """Schedules the program, with reduce-scatters as permutes if that is faster and fits."""
        mesh, topology, room = self.plan.mesh, self.plan.topology, self._room
        most, ahead = self._options.combine_bytes, self._options.prefetch

        def take(program: Program) -> None:
            args = program, mesh, topology, most, ahead, room
            scheduled = self.clock("optimize", schedule, *args)
            self.optimized = self.partitioned._replace(program=scheduled)
            for name in ("timeline", "_memory"):
                vars(self).pop(name, None)

        take(program)
        travelling = self.clock("optimize", ring, program, mesh, topology)
        if travelling is not program:
            whole = copy.copy(self)
            take(travelling)
            if self.seconds >= whole.seconds or self.bytes > max(whole.bytes, room.bytes):
                vars(self).update(vars(whole))

    @cached_property
    def timeline(self) -> Timeline:
        """Predicted schedule of one run."""
        plan, program = self.plan, self.optimized.program
        return self.clock("time", predict_timeline, program, plan.mesh, plan.topology)

    @property
    def seconds(self) -> float:
        """Predicted time of one run, in which collectives overlap independent arithmetic."""
        return self.timeline.seconds

    @cached_property
    def _memory(self) -> MemoryUse:
        program, platform = self.optimized.program, self.plan.topology.platform
        return self.clock("memory", peak_memory, program, self._donated, platform)

    @property
    def bytes(self) -> int:
        """Predicted memory of one device."""
        return self._memory.peak

    def fits(self, limit: float) -> bool:
        """Whether it takes at most `limit` bytes; the sum of all values is looked at first."""
        return self._bound <= limit or self.bytes <= limit

    @cached_property
    def _bound(self) -> int:
        return bound_of(self.plan)

    @property
    def largest(self) -> list[tuple[str, int]]:
        """Names and bytes of arguments, of results, and of the largest values live at the peak."""
        memory = self._memory
        values = [(buffer.name, buffer.bytes) for buffer in memory.at_peak()[:3]]
        results = memory.results - memory.aliased
        held = [("arguments", memory.arguments), ("results", results), *values]
        return [*held, ("constants", memory.constants)] if memory.constants else held
