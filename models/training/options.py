"""`TrainerOptions` of a training run of any model."""

import dataclasses
from pathlib import Path
from typing import Any

from spmd.cli.flags import words
from spmd.models.fields import from_yaml, read_by
from spmd.models.training.checkpoints.found import AUTO
from spmd.models.training.errors import RunError, check_ranges
from spmd.models.training.run.profile import ProfileRange
from spmd.models.training.run.step import ON_NONFINITE, OnNonfinite

METRICS = ("jsonl", "tensorboard")
"""The files of metrics that a run can write."""

NUMBERS = {
    "positive": ("steps", "microbatches", "keep_last", "data_threads"),
    "at least 0": (
        *("max_skipped", "eval_every", "eval_batches", "save_every", "keep_every", "log_every"),
        *("audit_every", "seed", "watchdog_timeout", "patience"),
    ),
}
"""What they have to be."""


def resume_step(text: str) -> int | str:
    """`"12"` -> 12; `"auto"` stays.

    Raises:
        RunError: it is neither.
    """
    if text == AUTO:
        return text
    if not text.isdecimal():
        raise RunError(f"{text!r} is no step, and not {AUTO}")
    return int(text)


def metrics_words(text: str) -> tuple[str, ...]:
    """Names of `METRICS`, joined by commas.

    Raises:
        RunError: one is none of them.
    """
    for name in words(text):
        if name not in METRICS:
            raise RunError(f"{name!r} is no file of metrics; there are {', '.join(METRICS)}")
    return words(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How long a run is, what it keeps, and when it looks up.

    Raises:
        RunError: a number is out of range, or a name is unknown.
    """

    steps: int  # of the whole run, counted from the very first
    # the folder for everything that the run writes, or its URL on an object store (`s3://`,
    # `gs://`); None writes nothing
    run_dir: str | Path | None = None
    # go on from a checkpoint in `run_dir`: a step, or `"auto"`, the latest that is whole, and anew
    # where there is none. None starts anew, and refuses a folder that holds a run.
    resume: int | str | None = dataclasses.field(default=AUTO, metadata=read_by(resume_step))
    seed: int = 0  # of the first parameters; Llamas' of samples and generated text, too
    data_threads: int = 1  # threads that call a `data(step)` of one's own at the same time
    offload_optimizer: bool = False  # whether the optimizer's state lies in the host's memory
    microbatches: int = 1  # number of parts that a batch is processed in, one after the other
    # what a loss, gradient or update that is not finite does: `"stop"` or `"skip"`
    on_nonfinite: OnNonfinite = "stop"
    max_skipped: int = 10  # the most steps in a row that may be skipped
    eval_every: int = 0  # steps between evaluations; 0 evaluates at the end only
    eval_batches: int = 8  # batches of an evaluation; 0 makes none
    eval_first: bool = False  # whether a fresh run evaluates before its first step
    patience: int = 0  # so many evaluations without a better one end the run; 0 never does
    save_every: int = 0  # steps between checkpoints; 0 saves at the end only
    keep_last: int = 3  # how many of the latest checkpoints are kept
    keep_every: int = 0  # those of every n-th step are kept too; 0 keeps none of them
    keep_best: bool = False  # whether each evaluation that is the best so far is saved, and kept
    audit_every: int = 0  # steps between comparisons of devices' copies of the state; 0 makes none
    audit_steps: bool = False  # whether every `audit_every`-th step is computed twice, too
    log_every: int = 0  # steps between lines of progress; 0 prints about twenty lines in all
    # which of `METRICS` are written into `run_dir`
    metrics: tuple[str, ...] = dataclasses.field(default=METRICS, metadata=read_by(metrics_words))
    # steps to trace
    profile: ProfileRange | None = dataclasses.field(
        default=None, metadata=read_by(ProfileRange.parse)
    )
    # seconds without a step after which the run ends; 0 never does
    watchdog_timeout: float = 1800.0
    verbose: bool = False  # whether every sharding and collective is printed

    def __post_init__(self) -> None:
        check_ranges(self, NUMBERS)
        if self.on_nonfinite not in ON_NONFINITE:
            raise RunError(
                f"on_nonfinite is {self.on_nonfinite!r}, not one of {', '.join(ON_NONFINITE)}"
            )
        if self.audit_steps and not self.audit_every:
            raise RunError("audit_steps computes the steps of audits twice: audit_every says which")
        metrics_words(",".join(self.metrics))

    @classmethod
    def from_yaml(cls, file: str | Path, **overrides: Any) -> "TrainerOptions":
        """The options in a file, each by its name: `steps: 100`.

        Args:
            file: YAML, as `scripts/train_llama.py --settings` reads it; `null` is None.
            overrides: options that go before those of the file.

        Raises:
            SettingsError: the file cannot be read, or has what is no option; says the line.
            RunError: as for `TrainerOptions`.

        Example:
            >>> TrainerOptions.from_yaml("run.yaml", run_dir="runs/b")
        """
        return from_yaml(cls, file, **overrides)

    @property
    def lines_every(self) -> int:
        """Steps between lines of progress."""
        return self.log_every or max(1, self.steps // 20)
