"""Forms of a program: the same one written otherwise, taken where that is predicted to be faster.

    stacked       equal work is done at once, and devices share it (`spmd.planning.stacks`)
    written out   loops of a few trips, so that trips overlap (`spmd.frontend.unroll`)

A form has a price, the seconds of a run that it has to win for what predictions leave out: time to
compile it, more kernels. The plan keeps what was weighed, and the report says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from spmd.frontend.lanes import described
from spmd.frontend.unroll import unroll
from spmd.ir.program import Program
from spmd.planning.exact import RUNS
from spmd.planning.plan import Plan
from spmd.planning.search import Candidate
from spmd.planning.stacks import Stacks
from spmd.predict.backends import backend_of
from spmd.trial import Trial

MOST_TRIPS = 64
"""Loops that run more often stay loops, if nobody says otherwise."""

WRITTEN_OUT_GAIN, MOST_GAIN = 0.02, 0.2
"""Share of its time that a program must win by having its loops written out, and the most that is
hoped for: a larger share of the time is not waited for."""

STACKED_GAIN = 0.05
"""Share of its time that a program must win by having equal work stacked.

Not priced: what is put side by side and taken apart may be copied where a fusion was predicted.
"""


def stacked_form(trial: Trial, found: Stacks, make: Callable[[], Trial]) -> Candidate[Trial]:
    """The form in which equal work is stacked: `make` brings it down to one device."""
    names = ", ".join(described(trial.plan.program, stack) for stack in found.stacks)
    return Candidate(f"stacked: {names}", make, trial.seconds * STACKED_GAIN, found.seconds)


def forms_written_out(
    trial: Trial, program: Program, planned: Callable[[Program, Plan], Trial], platform: str
) -> Iterator[Candidate[Trial]]:
    """The form in which loops are written out, where trips wait for the ones before them.

    Its ops are those of the loops: they choose among what these took, and what the marks suggest.
    """
    backend, hope = backend_of(platform), trial.seconds * MOST_GAIN
    if not backend.waits_at_loops or hope * RUNS < backend.compile_seconds:
        return
    written = trial.clock("unroll", unroll, program, MOST_TRIPS)
    more = sum(1 for _ in written.walk()) - sum(1 for _ in program.walk())
    if written is not program:
        price = max(more * backend.compile_seconds / RUNS, trial.seconds * WRITTEN_OUT_GAIN)
        name = f"loops of at most {MOST_TRIPS} trips written out"
        # Trips that overlap take more memory, and where there is none a plan is long looked for.
        make = None if trial.is_short else partial(planned, written, trial.plan)
        yield Candidate(name, make, price, hope)
