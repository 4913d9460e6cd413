"""Plans that keep to a memory limit: what is alive at the peak gets a price, until they do.

A Lagrangian relaxation: seconds for each byte of what is alive at the fullest moment are added to
the costs, and raised until the cheapest plan fits. Values pay wherever they have been alive at the
peak of a plan that was too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from spmd.errors import PlanError, bytes_text
from spmd.ir.program import Value
from spmd.mesh.sharding import format_sharding
from spmd.planning.liveness import bound_of, peak_of
from spmd.planning.plan import Plan

Prices = Mapping[Value, float]
"""Seconds for each byte that one device holds of a value."""

FIRST, STEP, CLOSE, ROUNDS = 1 / 64, 4.0, 1.5, 12
"""First price in seconds of the whole plan for the whole limit, its growth until a plan fits, the
ratio of two prices between which no third is tried, and plans to try at most."""


class Trial(Protocol):
    """A plan, and what one device's program of it is predicted to take."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def seconds(self) -> float:
        """Predicted time of one run."""

    @property
    def bytes(self) -> int:
        """Predicted memory of one device."""


TryOut = Callable[[Plan], Trial]
"""Brings a plan down to one device, as the stages behind the planner will."""


def fastest_within(
    memory_limit: int | None,
    tried: Sequence[Trial],
    priced: Callable[[Prices], Plan],
    try_out: TryOut,
) -> Plan:
    """The fastest plan found that keeps to a limit.

    Args:
      memory_limit: bytes on one device; if left out, the topology's memory, which is a wish.
      tried: plans made without prices.
      priced: makes a plan at given prices.
      try_out: predicts what it takes.

    Raises:
      PlanError: no plan keeps to the limit that was given.
    """
    best = min(tried, key=lambda trial: trial.seconds)
    limit = best.plan.topology.hbm_bytes if memory_limit is None else memory_limit
    if bound_of(best.plan) <= limit or best.bytes <= limit:
        return best.plan
    more = _priced(limit, best, priced, try_out)
    everything = [*tried, *more]
    fitting = [trial for trial in everything if trial.bytes <= limit]
    if fitting:
        found = min(fitting, key=lambda trial: trial.seconds)
        return _noted(
            found.plan,
            f"the fastest plan needs {bytes_text(best.bytes)} on a device, and there are "
            f"{bytes_text(limit)}: this one takes {found.seconds / best.seconds:.2f} times as long",
        )
    least = min(everything, key=lambda trial: trial.bytes)
    need = bytes_text(least.bytes)
    if memory_limit is None:
        text = f"it is predicted to need {need} on a device; there are {bytes_text(limit)}"
        return _noted(least.plan, text)
    raise PlanError(
        f"no plan was found that keeps to {bytes_text(limit)} on a device",
        actual=f"{need}, of which {_largest(least.plan)}",
        required=bytes_text(limit),
        fix="split arguments over more axes, use more devices, or checkpoint activations "
        "(jax.checkpoint) and split the batch into microbatches",
    )


def _priced(
    limit: int, trial: Trial, priced: Callable[[Prices], Plan], try_out: TryOut
) -> Iterator[Trial]:
    """Plans at prices that rise until one fits, then close in on the lowest price that does."""
    alive: dict[Value, None] = {}
    low, high = trial.seconds / limit * FIRST, 0.0
    price = low
    for _ in range(ROUNDS):
        if trial.bytes > limit:
            alive.update(dict.fromkeys(value for value, _ in peak_of(trial.plan).alive))
        trial = try_out(priced(dict.fromkeys(alive, price)))
        yield trial
        low, high = (price, high) if trial.bytes > limit else (low, price)
        if high and high <= low * CLOSE:
            break
        price = math.sqrt(low * high) if high else price * STEP


def _noted(plan: Plan, note: str) -> Plan:
    return plan._replace(notes=(*plan.notes, note))


def _largest(plan: Plan) -> str:
    """The arguments' share and the largest values at the peak, for people."""
    peak = peak_of(plan)
    types = plan.program.types
    own = set(plan.program.body.args)
    values = [(held, size) for held, size in peak.alive.items() if held[0] not in own]
    order = sorted(values, key=lambda item: -item[1])[:3]
    parts = [f"{bytes_text(peak.arguments)} arguments"]
    for (value, state), size in order:
        parts.append(f"{bytes_text(size)} {types[value]} {format_sharding(state, plan.mesh)}")
    return ", ".join(parts)
