"""The compiler's list of stages."""

import re

import numpy as np
import pytest

import spmd
from spmd import compiler

STAGES = (
    "import", "canonicalize", "separate", "dedupe", "lift", "unroll", "sink", "propagate", "shift",
    "plan", "partition", "optimize", "time", "memory", "stack", "layouts", "expand", "emit",
)  # fmt: skip


def test_every_stage_is_timed_and_printed_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))
    options = spmd.Options(verbose=True)
    lowered = spmd.jit(lambda x: x * 2, mesh=mesh, options=options).lower(np.ones(8, np.float32))
    assert tuple(lowered.stages.seconds) == STAGES
    printed = re.findall(r"^spmd: (\w+) +[\d.]+ ms$", capfd.readouterr().err, re.M)
    assert set(printed) == set(STAGES)
    assert printed[:5] + printed[-2:] == [*STAGES[:5], *STAGES[-2:]]
    assert all(seconds > 0 for seconds in lowered.stages.seconds.values())
    assert " ".join(STAGES) in " ".join((compiler.__doc__ or "").replace("->", "").split())
