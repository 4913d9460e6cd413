"""What a pipeline over stages is: its figures, and the name scope that carries them to reports.

`spmd.pipeline` is plain JAX. The compiler knows that a loop is a pipeline's only by this scope,
which also modules that were exported still have.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SCOPE = re.compile(r"pipeline\[(\w+),stages=(\d+),microbatches=(\d+),chunks=(\d+),lean=([01])\]")


class Pipeline(NamedTuple):
    """A pipeline's figures.

    Attributes:
      axis: the mesh axis of its stages.
      stages: how many there are.
      microbatches: into how many the batch is cut.
      chunks: runs of layers that each stage has. Stage s of S has the runs s, S + s, 2 S + s, ...
      is_lean: whether steps are computed again for the gradient, `window` steps at a time.
    """

    axis: str
    stages: int
    microbatches: int
    chunks: int = 1
    is_lean: bool = False

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

    @property
    def schedule(self) -> str:
        """The schedule's name."""
        named = {(1, False): "gpipe", (1, True): "1f1b"}
        return named.get((self.chunks, self.is_lean), "interleaved" + " 1f1b" * self.is_lean)

    @property
    def scope(self) -> str:
        """The name scope of its ops."""
        counts = f"stages={self.stages},microbatches={self.microbatches},chunks={self.chunks}"
        return f"pipeline[{self.axis},{counts},lean={self.is_lean:d}]"


def pipeline_of(scope: str) -> Pipeline | None:
    """The pipeline that an op with this scope belongs to, the innermost one."""
    found = _SCOPE.findall(scope)
    if not found:
        return None
    axis, *counts = found[-1]
    stages, microbatches, chunks, lean = map(int, counts)
    return Pipeline(axis, stages, microbatches, chunks, bool(lean))


def without_pipelines(scope: str) -> str:
    """A scope without what this file adds to it."""
    return _SCOPE.sub("", scope)
