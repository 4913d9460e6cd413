"""Plans that keep to a memory limit: what is alive at the peak gets a price, until they do.

A Lagrangian relaxation: seconds for each byte of what is alive at the fullest moment are added to
the costs, and raised until the cheapest plan fits. Values pay wherever they have been alive at the
peak of a plan that was too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from spmd.errors import PlanError, bytes_text
from spmd.ir.program import Value
from spmd.mesh.sharding import format_sharding
from spmd.planning.liveness import Peak, bound_of, peak_of
from spmd.planning.plan import Plan

Prices = Mapping[Value, float]
"""Seconds for each byte that one device holds of a value."""

FIRST, STEP, CLOSE, ROUNDS = 1 / 64, 4.0, 1.5, 12
"""First price in seconds of the whole plan for the whole limit, its growth until a plan fits, the
ratio of two prices between which no third is tried, and plans to try at most."""


def plan_within(
    memory_limit: int | None, plans: Sequence[Plan], priced: Callable[[Prices], Plan]
) -> Plan:
    """The fastest plan found that keeps to a limit.

    Args:
      memory_limit: bytes on one device; if left out, the topology's memory, which is a wish.
      plans: plans made without prices, the best first.
      priced: makes a plan at given prices.

    Raises:
      PlanError: no plan keeps to the limit that was given.
    """
    best = plans[0]
    limit = best.topology.hbm_bytes if memory_limit is None else memory_limit
    if bound_of(best) <= limit:
        return best
    tried = [(plan, peak_of(plan)) for plan in plans]
    if tried[0][1].bytes <= limit:
        return best
    tried += _priced_plans(limit, *tried[0], priced)
    fitting = [plan for plan, peak in tried if peak.bytes <= limit]
    if fitting:
        plan = min(fitting, key=lambda plan: plan.seconds)
        return _noted(
            plan,
            f"the fastest plan needs {bytes_text(tried[0][1].bytes)} on a device, and there are "
            f"{bytes_text(limit)}: this one takes {plan.seconds / best.seconds:.2f} times as long",
        )
    plan, peak = min(tried, key=lambda pair: pair[1].bytes)
    need = bytes_text(peak.bytes)
    if memory_limit is None:
        text = f"it is predicted to need {need} on a device; there are {bytes_text(limit)}"
        return _noted(plan, text)
    raise PlanError(
        f"no plan was found that keeps to {bytes_text(limit)} on a device",
        actual=f"{need}, of which {_largest(plan, peak)}",
        required=bytes_text(limit),
        fix="split arguments over more axes, use more devices, or checkpoint activations "
        "(jax.checkpoint) and split the batch into microbatches",
    )


def _priced_plans(
    limit: int, plan: Plan, peak: Peak, priced: Callable[[Prices], Plan]
) -> Iterator[tuple[Plan, Peak]]:
    """Plans at prices that rise until one fits, then close in on the lowest price that does."""
    alive: dict[Value, None] = {}
    low, high = plan.seconds / limit * FIRST, 0.0
    price = low
    for _ in range(ROUNDS):
        if peak.bytes > limit:
            alive.update(dict.fromkeys(value for value, _ in peak.alive))
        plan = priced(dict.fromkeys(alive, price))
        peak = peak_of(plan)
        yield plan, peak
        low, high = (price, high) if peak.bytes > limit else (low, price)
        if high and high <= low * CLOSE:
            break
        price = math.sqrt(low * high) if high else price * STEP


def _noted(plan: Plan, note: str) -> Plan:
    return plan._replace(notes=(*plan.notes, note))


def _largest(plan: Plan, peak: Peak) -> str:
    """The arguments' share and the largest values at the peak, for people."""
    types = plan.program.types
    own = set(plan.program.body.args)
    values = [(held, size) for held, size in peak.alive.items() if held[0] not in own]
    order = sorted(values, key=lambda item: -item[1])[:3]
    parts = [f"{bytes_text(peak.arguments)} arguments"]
    for (value, state), size in order:
        parts.append(f"{bytes_text(size)} {types[value]} {format_sharding(state, plan.mesh)}")
    return ", ".join(parts)
