"""Benchmarks at small sizes: the rows of their tables; without a compiler where it is not here."""

import pytest

from benchmarks import paged, products, published

Capture = pytest.CaptureFixture[str]


def table(capsys: Capture) -> list[dict[str, str]]:
    """The rows of a printed table, by the names in its head."""
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in printed)
    return [dict(zip(head, row, strict=True)) for row in rows]


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
