"""`moves_of`: every reshard that a plan makes, in order, what it costs and who asked for it."""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.control_flow import Tie
from spmd.ir.program import Op, Region, Value
from spmd.mesh.sharding import Sharding
from spmd.planning.plan import Choice, Plan
from spmd.planning.walk import Walk
from spmd.reshard.paths import Path, can_reshard, reshard


class Move(NamedTuple):
    """One reshard.

    Attributes:
      value: what is resharded.
      have, wanted: from where to where.
      user: the op that asked for it; None for carries and results.
      seconds, bytes: predicted time, and what each device sends, in one run (loops multiply).
    """

    value: Value
    have: Sharding
    wanted: Sharding
    user: Op | None
    seconds: float
    bytes: int


def moves_of(plan: Plan) -> tuple[Move, ...]:
    """Every reshard of a plan that costs anything, in program order."""
    replay = _Moves(plan)
    replay.run(plan.arguments, plan.result_marks, dict(plan.links))
    return tuple(replay.moves)


class Replay(Walk):
    """The walk that takes what a plan says; subclasses are told what it pays for, in order."""

    solver = "replay"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.propagated, plan.topology)
        self.plan = plan
        self.shared = dict(plan.copies)
        self.user: Op | None = None

    def moved(self, value: Value, have: Sharding, wanted: Sharding, path: Path) -> None:
        """A value is resharded, for `self.user`; None stands for carries and results."""
        raise NotImplementedError

    def choose(self, op: Op) -> tuple[Choice, float]:
        """What the plan chose; ops' own time does not count here."""
        self.user = op
        return self.plan.choice(op), 0.0

    def carry(self, tie: Tie) -> Sharding:
        """What the plan chose."""
        state = self.plan.states[tie.result]
        assert state is not None
        return state

    def region(self, region: Region, trips: int) -> None:
        """Settles a region; what it returns is no op's operand."""
        super().region(region, trips)
        self.user = None

    def control_flow(self, op: Op, trips: int) -> None:
        """Settles a region op; what it reads are carries."""
        self.user = None
        super().control_flow(op, trips)

    def reshard_seconds(self, value: Value, wanted: Sharding) -> float:
        """Called once for each copy that is made: the cheapest way counts."""
        type_ = self.types[value]
        paths = [
            (reshard(have, wanted, type_, self.mesh, self.topology), have)
            for have in self.copies[value]
            if can_reshard(have, wanted)
        ]
        path, have = min(paths, key=lambda pair: pair[0].seconds)
        if path.seconds:
            self.moved(value, have, wanted, path)
        return path.seconds


class _Moves(Replay):
    """Writes the reshards down."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.moves: list[Move] = []
        self.levels = [1]

    def enter(self) -> None:
        super().enter()
        self.levels.append(1)

    def leave(self) -> None:
        super().leave()
        self.levels.pop()

    def region(self, region: Region, trips: int) -> None:
        self.levels[-1] = trips
        super().region(region, trips)

    def moved(self, value: Value, have: Sharding, wanted: Sharding, path: Path) -> None:
        times = self.levels[-1]
        move = Move(value, have, wanted, self.user, path.seconds * times, path.bytes * times)
        self.moves.append(move)
