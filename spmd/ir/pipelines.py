"""Pipelines over stages: their sizes and schedules, and the name scope that marks their ops.

`spmd.pipeline` is written in plain JAX: the compiler recognizes a pipeline's loop by this name
scope alone, which exported modules keep.
"""

import re
from typing import NamedTuple

_SCOPE = re.compile(
    r"pipeline\[(\w+),stages=(\d+),microbatches=(\d+),chunks=(\d+),lean=([01]),open=(\d+)\]"
)
SHIFT = "to_next_stage"  # the name scope, inside a pipeline's, of what sends on what stages made

SCHEDULES = {
    "gpipe": (False, False),
    "1f1b": (False, True),
    "interleaved": (True, False),
    "interleaved 1f1b": (True, True),
}
"""Maps a schedule to (stages have several chunks of layers, the backward pass recomputes steps)."""


class Pipeline(NamedTuple):
    """One `spmd.pipeline`: its stages, microbatches and schedule, and the steps that it takes."""

    axis: str  # the mesh axis of its stages
    stages: int  # how many there are
    microbatches: int  # into how many the batch is cut
    # runs of layers that each stage has. Stage s of S has the runs s, S + s, 2 S + s, ..
    chunks: int = 1
    # whether steps are computed again for the gradient, `window` steps at a time
    is_lean: bool = False
    # the schedules that it could have taken, where nobody named one: bits, by `SCHEDULES`
    open: int = 0

    @property
    def busy_steps(self) -> int:
        """How many steps each stage has work in: one for each microbatch and chunk of layers."""
        return self.microbatches * self.chunks

    @property
    def steps(self) -> int:
        """How many steps the pipeline takes: `busy_steps`, plus 1 for each stage but the first."""
        return self.busy_steps + self.stages - 1

    @property
    def window(self) -> int:
        """How many steps a stage takes to bring `stages` microbatches through all of its chunks."""
        return self.stages * self.chunks

    def work(self, stage: int, step: int) -> tuple[int, int] | None:
        """Returns the (microbatch, chunk) numbers of what a stage does in a step; None if idle."""
        done = step - stage
        if not 0 <= done < self.busy_steps:
            return None
        group, place = divmod(done, self.window)
        return group * self.stages + place % self.stages, place // self.stages

    @property
    def schedule(self) -> str:
        """The schedule's name, a key of `SCHEDULES`."""
        traits = self.chunks > 1, self.is_lean
        return next(name for name, those in SCHEDULES.items() if those == traits)

    @property
    def open_schedules(self) -> tuple[str, ...]:
        """The schedules that the compiler may choose from; empty if the user named one."""
        return tuple(name for i, name in enumerate(SCHEDULES) if self.open >> i & 1)

    @property
    def scope(self) -> str:
        """The pipeline's name scope: `pipeline[stage,stages=4,microbatches=8,chunks=1,...]`."""
        counts = f"stages={self.stages},microbatches={self.microbatches},chunks={self.chunks}"
        return f"pipeline[{self.axis},{counts},lean={self.is_lean:d},open={self.open}]"


def pipelines_in(text: str) -> tuple[Pipeline, ...]:
    """Returns the pipelines whose `Pipeline.scope` occurs in a text, in this order, each once."""
    return tuple(
        Pipeline(axis, int(stages), int(microbatches), int(chunks), lean == "1", int(opened))
        for axis, stages, microbatches, chunks, lean, opened in dict.fromkeys(_SCOPE.findall(text))
    )


def pipeline_of(scope: str) -> Pipeline | None:
    """Returns the innermost pipeline in an op's name scope (see `Pipeline.scope`); None if none."""
    return next(reversed(pipelines_in(scope)), None)


def without_pipelines(scope: str) -> str:
    """Returns an op's name scope without what `spmd.pipeline` added to it."""
    return _SCOPE.sub("", scope).replace(SHIFT, "")
