"""Slack: how long a device computes between making a value and reading it.

A machine that communicates beside its arithmetic hides a reshard there. Gathers of weights and sums
of gradients have much slack, as the device computes layers in between; what one product of a layer
leaves for the next has none.

    %1 = dot %x, %w0     %w1 is there from the start: its slack is the first product
    %2 = dot %1, %w1     %1 is read at once: it has none
"""

from __future__ import annotations

from collections.abc import Mapping

from spmd.ir.control_flow import ties
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Region, Value
from spmd.planning.choices import Choices
from spmd.planning.units import Units
from spmd.propagation.projection import unsplit

Slack = Mapping[tuple[int, int, int], float]
"""(source, result, target) of a use between classes -> seconds."""


def slack_of(choices: Choices, units: Units) -> Slack:
    """The slack of every use, if arithmetic is split evenly over all devices.

    Ops run in the order of the program; loops do not reach into the trip before, so what is handed
    to a trip is there when it begins. Results of the program have none: people wait for them. Of
    uses that are one to the planner: the mean.
    """
    found = _Clock(choices, units)
    found.region(choices.problem.program.body)
    return {key: seconds / count for key, (seconds, count) in found.slack.items()}


class _Clock:
    def __init__(self, choices: Choices, units: Units) -> None:
        self.choices, self.units = choices, units
        self.devices = choices.mesh.size
        self.slack: dict[tuple[int, int, int], tuple[float, int]] = {}

    def use(self, value: Value, target: int, seconds: float) -> None:
        key = (*self.units.of[value], target)
        total, count = self.slack.get(key, (0.0, 0))
        self.slack[key] = total + seconds, count + 1

    def region(self, region: Region) -> tuple[float, dict[Value, float]]:
        """Seconds of one run of a region, and when in it values are made."""
        problem, of = self.choices.problem, self.units.of
        now, made = 0.0, dict[Value, float]()
        for op in region.ops:
            if op.regions:
                bound = ties(op)
                for tie in bound:
                    if tie.source is not None:
                        self.use(tie.source, of[tie.result][0], now - made.get(tie.source, 0.0))
                for inner in op.regions[op.is_loop :]:
                    end, inside = self.region(inner)
                    for tie, value in zip(bound, inner.results, strict=True):
                        self.use(value, of[tie.result][0], end - inside.get(value, 0.0))
                    now += end * problem.index.runs(op)
            else:
                for value in op.operands:
                    self.use(value, of[op.results[0]][0], now - made.get(value, 0.0))
                whole = unsplit(rule_of(op.kind, op.loc))
                now += self.choices.own_seconds(op, whole) / self.devices
            made |= dict.fromkeys(op.results, now)
        return now, made
