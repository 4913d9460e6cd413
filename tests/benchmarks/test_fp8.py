"""The comparison of losses, at a size that takes seconds."""

import re

import pytest

from benchmarks import fp8


@pytest.mark.heavy
def test_both_runs_start_alike_and_stay_close(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden_size 64 --layers 1 --seq_len 16 --global_batch 4 --dtype float32 --scan"
    fp8.main([*sizes.split(), "--mesh", "data=2", "--steps", "3", "--every", "2"])
    printed = capsys.readouterr().out
    rows = re.findall(r"\| ([\w ]+) \| ([\d.]+) \| ([\d.]+) \| [+-][\d.]+% \|", printed)
    assert [name for name, _, _ in rows] == ["1", "3", "mean of the last 3"]
    for _, want, got in rows:
        assert float(got) == pytest.approx(float(want), rel=0.03)
