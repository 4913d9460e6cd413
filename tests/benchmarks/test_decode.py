"""`benchmarks/run decode` on a small model."""

from __future__ import annotations

import pytest

from benchmarks import decode


def test_a_row_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--layers 1 --context 64 --page 16 --tokens 4 --batches 2 --chunk 5 --peer"
    decode.main(flags.split())
    *_, head, _, ours, plain = capsys.readouterr().out.splitlines()
    columns = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head, ours, plain)]
    assert [row[0] for row in columns] == ["weights", "none", "none, jax.jit"]
    for row in columns[1:]:
        assert row[2:5] == ["2", "5", "1"] and float(row[5]) > 0
