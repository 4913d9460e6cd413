"""Benchmarks at small sizes: the rows of their tables; without a compiler where it is not here."""

from typing import Any

import pytest

from benchmarks import (
    compiled_ahead,
    decode,
    experts,
    long,
    paged,
    placed,
    products,
    published,
)
from spmd.ir.dialect import rule

Capture = pytest.CaptureFixture[str]


def table(capsys: Capture) -> list[dict[str, str]]:
    """The rows of a printed table, by the names in its head."""
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in printed)
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.heavy
def test_decode(capsys: Capture) -> None:
    flags = "--layers 1 --context 64 --page 16 --tokens 4 --batches 2 --chunk 5"
    decode.main(flags.split())
    (row,) = table(capsys)
    shown = [row[name] for name in ("weights", "batch", "chunk", "devices")]
    assert shown == ["none", "2", "5", "1"] and float(row["ms/step"]) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.heavy), "int8"])
def test_paged(dtype: str, capsys: Capture) -> None:
    sizes = "--slots 3 --context 64 --key_heads 2 --groups 2 --width 16 --page 16 --chunk 20"
    paged.main([*sizes.split(), "--dtype", dtype, "--calls", "2", "--steps", "1"])
    said = capsys.readouterr().out.splitlines()[3:]
    assert [line.split(" | ")[0] for line in said] == ["| pages", "| pages, chunk"]
    wanted = 3 * 64 * 2 * 2 * 16 * (4 if dtype == "float32" else 1.25) / 1e6
    assert said[0].split(" | ")[2] == f"{wanted:.1f}"


@pytest.mark.thorough
def test_products(capsys: Capture) -> None:
    sizes = "--width 256 --inner 256 --rows 1,3 --calls 1 --steps 1"
    products.main(sizes.split())
    rows = table(capsys)
    kinds = [(row["weights"], row["rows"]) for row in rows]
    assert kinds == [(kind, count) for kind in products.KINDS for count in ("1", "3")]
    assert all(float(row["ours, us"]) > 0 for row in rows)


@pytest.mark.heavy
def test_long(capsys: Capture) -> None:
    most = rule.MOST_PIECES
    flags = ["--model", "llama3.2-1b", "--layers", "1", "--nocompile", "--rows", "h200-8"]
    long.main([*flags, "--seq_len", "65536", "--programs", "ring,gathered,jax.jit"])
    assert most == rule.MOST_PIECES
    rows = table(capsys)
    assert [list(row.values())[1] for row in rows] == ["ring", "gathered", "jax.jit"]
    ring, gathered, plain = rows
    assert 0 < float(ring["predicted s"]) <= float(gathered["predicted s"])
    assert 1 < float(ring["predicted GiB"]) <= float(gathered["predicted GiB"]) + 0.1
    assert plain["compiler GiB"] == "-"


@pytest.mark.heavy
def test_experts(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    small = compiled_ahead.Row("mixtral-8x7b", "v5p:2x2x2", {"data": 2, "expert": 4}, 32)
    monkeypatch.setitem(experts.ROWS, "small", small)
    flags = ["--rows", "small", "--layers", "1", "--seq_len", "4096", "--nocompile"]
    experts.main([*flags, "--programs", "ours,ours-gathered,jax.jit"])
    ours, whole, plain = table(capsys)
    assert 0 < float(ours["GB sent"]) < float(whole["GB sent"])
    assert 0 < float(ours["predicted s"]) <= float(whole["predicted s"])
    assert float(ours["predicted GiB"]) > 1
    assert plain["GB sent"] == plain["compiler GiB"] == "-"


@pytest.mark.heavy
@pytest.mark.usefixtures("devices8", "exact_plans")
def test_placed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free plan computes the same and sends no more."""
    ran: list[str] = []

    def once(_: Any, run: Any, args: Any) -> float:
        ran.append(type(run).__name__)
        return 1.0

    monkeypatch.setattr(placed, "milliseconds", once)
    names = ["muon", "linear-attention"]
    placed.main(["--programs", ",".join(names), "--scale", "64"])
    rows = table(capsys)
    assert [next(iter(row.values())) for row in rows] == names and len(ran) == 3 * len(names)
    for row in rows:
        assert float(row["apart"]) < 1e-5, row
        assert float(row["free, predicted ms"]) <= float(row["by hand, predicted ms"]), row


@pytest.mark.heavy
def test_published(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own mesh is planned as well, and is no faster than the best."""
    run = published.PublishedRun("tiny", "h200:4", 8, 64, {"data": 4, "model": 1}, 1000)
    monkeypatch.setitem(published.RUNS, "tiny", run)
    published.main(["--rows", "tiny", "--seconds", "2", "--microbatches", "1"])
    (row,) = table(capsys)
    assert (row["run"], row["batch"], row["published"]) == ("tiny", "8 x 64", "1,000")
    best, own = (float(row[name].replace(",", "")) for name in ("predicted", "predicted there"))
    assert row["memory there"] == "fits" and best >= own > 0
    assert float(row["predicted there / published"]) == pytest.approx(own / 1000, abs=0.01)
