"""`Options` of a training run of any model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from models.training.checkpoints.found import AUTO
from models.training.run.profile import ProfileRange
from models.training.run.step import OnNonfinite

METRICS = ("jsonl", "tensorboard")
"""The files of metrics that a run can write."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How long a run is, what it keeps, and when it looks up.

    Args:
        steps: of the whole run, counted from the very first.
        run_dir: the folder for everything that the run writes, or its URL on an object store
            (`s3://`, `gs://`); None writes nothing.
        resume: go on from a checkpoint in `run_dir`: a step, or `"auto"`, the latest that is whole,
            and anew where there is none. None starts anew, and refuses a folder that holds a run.
        seed: of the first parameters.
        microbatches: number of parts that a batch is processed in, one after the other.
        on_nonfinite: what a loss or gradient that is not finite does: `"stop"` or `"skip"`.
        max_skipped: the most steps in a row that may be skipped.
        eval_every: steps between evaluations; 0 evaluates at the end only.
        eval_batches: batches of an evaluation; 0 makes none.
        evaluates_first: whether a fresh run evaluates before its first step.
        save_every: steps between checkpoints; 0 saves at the end only.
        keep_last: how many of the latest checkpoints are kept.
        keep_every: those of every n-th step are kept too; 0 keeps none of them.
        log_every: steps between lines of progress; 0 prints about twenty lines in all.
        metrics: which of `METRICS` are written into `run_dir`.
        profile: steps to trace.
        watchdog_timeout: seconds without a step after which the run ends; 0 never does.
        verbose: whether every sharding and collective is printed.
    """

    steps: int
    run_dir: str | Path | None = None
    resume: int | str | None = AUTO
    seed: int = 0
    microbatches: int = 1
    on_nonfinite: OnNonfinite = "stop"
    max_skipped: int = 10
    eval_every: int = 0
    eval_batches: int = 8
    evaluates_first: bool = False
    save_every: int = 0
    keep_last: int = 3
    keep_every: int = 0
    log_every: int = 0
    metrics: tuple[str, ...] = METRICS
    profile: ProfileRange | None = None
    watchdog_timeout: float = 1800.0
    verbose: bool = False

    @property
    def lines_every(self) -> int:
        """Steps between lines of progress."""
        return self.log_every or max(1, self.steps // 20)
