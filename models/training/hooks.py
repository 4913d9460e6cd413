"""What a program adds to the run of a `Trainer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from models.training.checkpoints.found import Found
from models.training.program import TrainingProgram
from models.training.run.loop import Outcome
from spmd import launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a program adds to a run; every process calls each of them."""

    # called with the checkpoint to go on from, or None; raises an error if that is not of this run,
    # or returns what has changed since
    before: Callable[[Found | None], list[str]] = lambda found: []
    # makes the parameters to start from, such as weights of others; None draws them
    first_params: Callable[[TrainingProgram], Any] = lambda program: None
    # called after the last step of a run that was not stopped, while the watchdog watches
    after: Callable[[TrainingProgram, Outcome, launch.Watch], None] = (
        lambda program, outcome, watch: None
    )
