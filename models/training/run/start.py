"""Where a run begins: at a checkpoint of its folder, or with fresh parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from models.training.checkpoints.found import Found
from models.training.checkpoints.store import Checkpoints
from models.training.errors import RunError
from models.training.program import Program
from models.training.run.loop import TrainState


def find_checkpoint(
    checkpoints: Checkpoints, wanted: int | str | None, console: Console
) -> Found | None:
    """Where a run goes on; None to start anew.

    Raises:
        RunError: it is to start anew, and the folder holds a run.
        CheckpointError: the wanted step has no checkpoint, or all are damaged.
    """
    if wanted is None:
        steps = checkpoints.steps()
        if not steps:
            return None
        raise RunError(
            f"run_dir: {checkpoints.folder.parent} holds a run that has come to step {steps[0]}; "
            "go on from there with --resume (Options.resume), or name another folder"
        )
    found = checkpoints.find(wanted)
    for note in checkpoints.notes:
        console.print(note)
    if found is None:
        console.print("no checkpoint yet: starting anew")
    return found


def first_state(
    program: Program,
    checkpoints: Checkpoints | None,
    found: Found | None,
    first_params: Callable[[Program], Any],
    *,
    seed: int,
    console: Console,
) -> TrainState:
    """The state to go on from: a checkpoint's, or a fresh one, perhaps with given weights.

    Args:
        program: whose state it is.
        checkpoints: of the run folder, if there is one.
        found: the checkpoint, if there is one.
        first_params: makes the parameters of a fresh one; None draws them.
        seed: draws them.
        console: gets a line on what is restored.
    """
    if checkpoints is None or found is None:
        return program.fresh_state(first_params(program), seed=seed)
    started = time.perf_counter()
    state = checkpoints.restore(found, program.targets())
    seconds = time.perf_counter() - started
    console.print(f"resuming after step {found.step}, restored in {seconds:.1f} s")
    if state.opt_state is None:
        console.print("the checkpoint holds weights alone: the optimizer starts anew")
        return program.fresh_state(state.params, found.step)
    return state
