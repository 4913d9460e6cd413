"""One long sequence through a training step: lines of the table, without a compiler."""

from __future__ import annotations

import pytest

from benchmarks import long
from spmd.ir.dialect import rule


def test_lines_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    most = rule.MOST_PIECES
    flags = ["--model", "llama3.2-1b", "--layers", "1", "--nocompile", "--rows", "h200-8"]
    long.main([*flags, "--seq_len", "65536", "--programs", "ring,gathered,jax.jit"])
    head, *lines = [line for line in capsys.readouterr().out.splitlines() if line[0] == "|"]
    assert most == rule.MOST_PIECES
    names = [cell.strip() for cell in head.strip("|").split("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    found = {row[1]: dict(zip(names, row, strict=True)) for row in rows}
    assert list(found) == ["ring", "gathered", "jax.jit"]
    seconds = {name: float(found[name]["predicted s"]) for name in ("ring", "gathered")}
    assert 0 < seconds["ring"] <= seconds["gathered"]
    memory = {name: float(found[name]["predicted GiB"]) for name in ("ring", "gathered")}
    assert 1 < memory["ring"] <= memory["gathered"] + 0.1
    assert found["jax.jit"]["compiler GiB"] == "-"
