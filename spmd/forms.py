"""Forms of a program: the same one written otherwise, taken where that is predicted to be faster.

    stacked       equal work is done at once, and devices share it (`spmd.planning.stacks`)
    written out   loops of a few trips, so that trips overlap (`spmd.frontend.unroll`)
    in halves     one half computes while the other one is exchanged (`spmd.lowering.halves`)

A form has a price, the seconds of a run that it has to win for what predictions leave out: time to
compile it, more kernels. One that cannot win so much is not made. Of those that do and that fit in
memory the fastest is taken. The plan keeps what was weighed, and the report says it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from spmd.errors import PlanError
from spmd.frontend.stack import described
from spmd.frontend.unroll import unroll
from spmd.ir.program import Program
from spmd.planning.exact import RUNS
from spmd.planning.plan import Weighed
from spmd.planning.stacks import Stacks
from spmd.predict.backends import backend_of, memory_for
from spmd.trial import Trial

MOST_TRIPS = 64
"""Loops that run more often stay loops, if nobody says otherwise."""

WRITTEN_OUT_GAIN, MOST_GAIN = 0.02, 0.2
"""Share of its time that a program must win by having its loops written out, and the most that is
hoped for: a larger share of the time is not waited for."""

HALVES_GAIN = 0.07
"""Share of its time that a program must win by running in halves.

Not priced: twice the kernels, and products that slow down beside communication. On two H200s a
tensor-parallel step that waits and idles 11 ms instead of 26 takes as long as before, 190 ms, where
6% less was predicted; for v5e:4x4 the TPU compiler makes 143 ms with halves and 142 without.
"""


STACKED_GAIN = 0.05
"""Share of its time that a program must win by having equal work stacked.

Not priced: what is put side by side and taken apart may be copied where a fusion was predicted.
"""


class Form(NamedTuple):
    """One that a program could take.

    Attributes:
      name: what is done to it, for people.
      price: seconds of a run that it has to win.
      hope: the most that it can win.
      make: brings it down to one device; None where there is no memory for it.
    """

    name: str
    price: float
    hope: float
    make: Callable[[], Trial] | None


def fastest(trial: Trial, forms: Iterable[Form], memory_limit: int | None) -> Trial:
    """A program as it is, or the fastest of the forms that win their price and fit in memory.

    Args:
      trial: the program as it is.
      forms: the others. One of a price below zero is wanted, even if it is slower.
      memory_limit: bytes that one device may use; what the topology has room for when left out.
    """
    tried = [(form, *_tried(trial, form, memory_limit)) for form in forms]
    fit = [other for _, other, refusal in tried if other is not None and not refusal]
    best = min(fit, key=lambda other: other.seconds, default=trial)
    weighed = []
    for form, other, refusal in tried:
        refusal = refusal or ("another one is faster" if other is not best else "")
        seconds = other.seconds if other is not None else None
        weighed.append(Weighed(form.name, seconds, trial.seconds, refusal))
    best.plan = best.plan._replace(forms=(*best.plan.forms, *weighed))
    return best


def _tried(trial: Trial, form: Form, memory_limit: int | None) -> tuple[Trial | None, str]:
    """A form, None if it is not made; and why it is not taken, empty if it may be."""
    too_slow = f"it would have to win {form.price * 1e3:.3g} ms"
    too_large = "it does not fit in memory"
    if form.hope < form.price:
        return None, too_slow
    if form.make is None:
        return None, too_large
    try:
        other = form.make()
    except PlanError:  # no plan of it keeps to the limit
        return None, too_large
    if trial.seconds - other.seconds < form.price:
        return other, too_slow
    limit = max(trial.bytes, memory_for(trial.plan.topology, memory_limit))
    return other, too_large if other.bytes > limit else ""


def forms_stacked(trial: Trial, found: Stacks, make: Callable[[], Trial]) -> Iterator[Form]:
    """The form in which equal work is stacked: `make` brings it down to one device."""
    names = ", ".join(described(trial.plan.program, stack) for stack in found.stacks)
    yield Form(f"stacked: {names}", trial.seconds * STACKED_GAIN, found.seconds, make)


def forms_written_out(
    trial: Trial, program: Program, planned: Callable[[Program], Trial], platform: str
) -> Iterator[Form]:
    """The form in which loops are written out, where trips wait for the ones before them."""
    backend, hope = backend_of(platform), trial.seconds * MOST_GAIN
    if not backend.waits_at_loops or hope * RUNS < backend.compile_seconds:
        return
    written = trial.clock("unroll", unroll, program, MOST_TRIPS)
    more = sum(1 for _ in written.walk()) - sum(1 for _ in program.walk())
    if written is not program:
        price = max(more * backend.compile_seconds / RUNS, trial.seconds * WRITTEN_OUT_GAIN)
        name = f"loops of at most {MOST_TRIPS} trips written out"
        # Trips that overlap take more memory, and where there is none a plan is long looked for.
        yield Form(name, price, hope, None if trial.is_short else partial(planned, written))


def forms_in_halves(trial: Trial, wanted: bool | None) -> Iterator[Form]:
    """The forms in which a dim of arguments is cut; `wanted` is as in `Options(halves=)`."""
    if wanted is False:
        return
    timeline, overlap = trial.timeline, trial.plan.topology.chip.overlap
    price = -math.inf if wanted else trial.seconds * HALVES_GAIN
    if (timeline.scheduled_seconds - timeline.compute_seconds) * overlap < price:
        return
    names = trial.plan.program.arg_names
    for seed in trial.seeds():
        dims = ", ".join(f"{names[number]} (dim {cut.dim})" for number, cut in seed.cuts)
        name = f"{dims} in two halves, one computed while the other is exchanged"
        yield Form(name, price, seed.seconds * overlap, partial(trial.in_halves, seed))
