"""Training steps over stages: lines of the table, without a compiler."""

from __future__ import annotations

import pytest

from benchmarks import stages


def test_lines_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nocompile", "--layers", "4", "--batch", "32", "--rows", "7b-1,7b-2"]
    stages.main([*flags, "--programs", "gpipe,interleaved,auto,jax.jit"])
    head, _, *lines = [line for line in capsys.readouterr().out.splitlines() if line[0] == "|"]
    names = [cell.strip() for cell in head.strip("|").split("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {(row[0], row[2]): dict(zip(names, row, strict=True)) for row in rows}
    assert [program for row, program in found if row == "7b-1"] == ["spmd.jit", "jax.jit"]
    (auto,) = [program for _, program in found if program.startswith("auto")]
    taken = auto.partition(": ")[2]
    seconds = {
        program: float(cells["predicted s"])
        for (row, program), cells in found.items()
        if row == "7b-2" and program != "jax.jit"
    }
    assert seconds[auto] == seconds[taken] == min(seconds.values()) > 0
    assert found["7b-2", "gpipe"]["bubble"] == found["7b-2", "jax.jit"]["bubble"] == "5.9%"
    assert found["7b-2", "interleaved"]["bubble"] == "3.0%"
    assert found["7b-1", "spmd.jit"]["bubble"] == "-"
    assert float(found["7b-2", "gpipe"]["GB sent"]) > 0
    assert found["7b-2", "jax.jit"]["compiler GiB"] == "-"
