"""A compiled program in one line: what `repr` says."""

from __future__ import annotations

from collections.abc import Sequence

from spmd.explain.collectives import Collective
from spmd.explain.memory import Memory
from spmd.explain.words import bytes_text, plural, seconds_text
from spmd.pipeline import Stages


def brief(
    what: str,
    name: str,
    stages: Stages,
    collectives: Sequence[Collective],
    memory: Memory,
    seconds: float,
) -> str:
    """A program's mesh and figures.

    Args:
      what: the class, as `Compiled`.
      name: the function's name.
      stages: the pipeline's results.
      collectives: what one run of the program exchanges.
      memory: bytes per device, predicted or as XLA reports them.
      seconds: predicted time of a run.

    Returns:
      `<spmd.Compiled train_step on data=4, model=2 (8 cpu): 14 collectives, 3.2 MiB sent per
      device, 41 MiB memory per device, predicted 1.9 ms>`.
    """
    mesh, chip = stages.plan.mesh, stages.plan.topology.chip.name
    sent = sum(c.bytes * c.count for c in collectives)
    figures = (
        plural(len(collectives), "collective"),
        f"{bytes_text(sent)} sent per device",
        f"{bytes_text(memory.peak_bytes)} memory per device",
        f"predicted {seconds_text(seconds)}",
    )
    return f"<spmd.{what} {name} on {mesh} ({mesh.size} {chip}): {', '.join(figures)}>"
