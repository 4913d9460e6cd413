"""A benchmark at small sizes: the rows of its table."""

import pytest

from benchmarks import published

Capture = pytest.CaptureFixture[str]


def table(capsys: Capture) -> list[dict[str, str]]:
    """The rows of a printed table, by the names in its head."""
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in printed)
    return [dict(zip(head, row, strict=True)) for row in rows]


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
