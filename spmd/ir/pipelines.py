"""Pipelines over stages: their sizes and schedules, and the name scope that marks their ops.

`spmd.pipeline` is plain JAX. The compiler knows that a loop is a pipeline's only by this scope,
which modules that were exported still have.
"""

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
    """The stages, microbatches and schedule of a pipeline, and the steps that follow from them."""

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
        """Steps in which a stage has work: one for each microbatch and chunk of layers."""
        return self.microbatches * self.chunks

    @property
    def steps(self) -> int:
        """Steps in all: the last stage begins `stages - 1` after the first."""
        return self.busy_steps + self.stages - 1

    @property
    def window(self) -> int:
        """Steps that a stage takes for `stages` microbatches, with all of its chunks of layers."""
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
        """The schedules that could have been chosen; empty where the user named one."""
        return tuple(name for i, name in enumerate(SCHEDULES) if self.open >> i & 1)

    @property
    def scope(self) -> str:
        """The name scope of its ops: `pipeline[stage,stages=4,microbatches=8,chunks=1,...]`."""
        counts = f"stages={self.stages},microbatches={self.microbatches},chunks={self.chunks}"
        return f"pipeline[{self.axis},{counts},lean={self.is_lean:d},open={self.open}]"


def pipelines_in(text: str) -> tuple[Pipeline, ...]:
    """Reads the pipelines that name scopes in a text speak of, each once."""
    found = [(axis, *map(int, counts)) for axis, *counts in dict.fromkeys(_SCOPE.findall(text))]
    return tuple(Pipeline(*given, bool(lean), open_) for *given, lean, open_ in found)


def pipeline_of(scope: str) -> Pipeline | None:
    """Reads the innermost pipeline from an op's name scope; None if there is none."""
    return next(reversed(pipelines_in(scope)), None)


def without_pipelines(scope: str) -> str:
    """Returns a name scope without the parts that `spmd.pipeline` adds."""
    return _SCOPE.sub("", scope).replace(SHIFT, "")
