"""Figures of pipelines: what each stage works on in each step."""

import pytest

from spmd.ir.pipelines import Pipeline

SOME = [Pipeline("stage", 4, 8), Pipeline("stage", 4, 2), Pipeline("stage", 3, 6, chunks=2)]


@pytest.mark.parametrize("of", SOME, ids=str)
def test_microbatches_go_from_stage_to_stage(of: Pipeline) -> None:
    done = {
        (stage, step): work
        for stage in range(of.stages)
        for step in range(of.steps)
        if (work := of.work(stage, step)) is not None
    }
    everything = [(m, c) for m in range(of.microbatches) for c in range(of.chunks)]
    for stage in range(of.stages):
        assert sorted(work for (s, _), work in done.items() if s == stage) == everything
    for (stage, step), (microbatch, chunk) in done.items():
        if stage < of.stages - 1:
            assert done[stage + 1, step + 1] == (microbatch, chunk)
        elif chunk < of.chunks - 1:
            assert done[0, step + 1] == (microbatch, chunk + 1)
    assert of.work(0, of.steps) is None
    assert of.work(1, 0) is None
