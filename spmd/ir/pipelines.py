"""What a pipeline over stages is: its figures, and the name scope that carries them to reports.

`spmd.pipeline` is plain JAX. The compiler knows that a loop is a pipeline's only by this scope,
which also modules that were exported still have.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import NamedTuple

_SCOPE = re.compile(
    r"pipeline\[(\w+),stages=(\d+),microbatches=(\d+),chunks=(\d+),lean=([01]),"
    r"open=(\d+)\]"
)
SHIFT = "to_next_stage"  # the name scope, inside a pipeline's, of what sends on what stages made

SCHEDULES = MappingProxyType(
    {
        "gpipe": (False, False),
        "1f1b": (False, True),
        "interleaved": (True, False),
        "interleaved 1f1b": (True, True),
    }
)
"""Name -> whether stages have several chunks of layers, and whether steps are computed again."""


class Pipeline(NamedTuple):
    """A pipeline's figures."""

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
        """Steps in which a stage computes what is wanted."""
        return self.microbatches * self.chunks

    @property
    def steps(self) -> int:
        """Steps in all: the last stage begins `stages - 1` after the first."""
        return self.busy_steps + self.stages - 1

    @property
    def window(self) -> int:
        """Steps in which `stages` microbatches pass a stage."""
        return self.stages * self.chunks

    def work(self, stage: int, step: int) -> tuple[int, int] | None:
        """(microbatch, chunk) that a stage computes in a step; None while it fills and drains."""
        done = step - stage
        if not 0 <= done < self.busy_steps:
            return None
        group, place = divmod(done, self.window)
        return group * self.stages + place % self.stages, place // self.stages

    @property
    def schedule(self) -> str:
        """The schedule's name."""
        traits = self.chunks > 1, self.is_lean
        return next(name for name, those in SCHEDULES.items() if those == traits)

    @property
    def open_schedules(self) -> tuple[str, ...]:
        """The schedules that it could have taken, where nobody named one."""
        return tuple(name for i, name in enumerate(SCHEDULES) if self.open >> i & 1)

    @property
    def scope(self) -> str:
        """The name scope of its ops."""
        counts = f"stages={self.stages},microbatches={self.microbatches},chunks={self.chunks}"
        return f"pipeline[{self.axis},{counts},lean={self.is_lean:d},open={self.open}]"


def pipeline_of(scope: str) -> Pipeline | None:
    """The pipeline that an op with this scope belongs to, the innermost one."""
    found = _SCOPE.findall(scope)
    if not found:
        return None
    axis, *counts = found[-1]
    stages, microbatches, chunks, lean, open_ = map(int, counts)
    return Pipeline(axis, stages, microbatches, chunks, bool(lean), open_)


def without_pipelines(scope: str) -> str:
    """A scope without what this file adds to it."""
    return _SCOPE.sub("", scope).replace(SHIFT, "")
