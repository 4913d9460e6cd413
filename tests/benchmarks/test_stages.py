"""Training steps over stages: lines of the table, without a compiler."""

from __future__ import annotations

import pytest

from benchmarks import stages


@pytest.mark.heavy
def test_lines_without_a_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = stages.ROWS["7b-2"]._replace(microbatches=4)
    monkeypatch.setitem(stages.ROWS, "7b-2", few)
    flags = ["--nocompile", "--layers", "2", "--batch", "16", "--rows", "7b-1,7b-2"]
    stages.main([*flags, "--programs", "gpipe,jax.jit"])
    head, _, *lines = [line for line in capsys.readouterr().out.splitlines() if line[0] == "|"]
    names = [cell.strip() for cell in head.strip("|").split("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {(row[0], row[2]): dict(zip(names, row, strict=True)) for row in rows}
    assert [program for row, program in found if row == "7b-1"] == ["spmd.jit", "jax.jit"]
    assert found["7b-2", "gpipe"]["bubble"] == found["7b-2", "jax.jit"]["bubble"] == "20.0%"
    assert found["7b-1", "spmd.jit"]["bubble"] == "-"
    for cell in ("predicted s", "GB sent", "predicted GiB"):
        assert float(found["7b-2", "gpipe"][cell]) > 0
    assert found["7b-2", "jax.jit"]["compiler GiB"] == "-"
