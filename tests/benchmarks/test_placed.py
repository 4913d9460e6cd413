"""Programs marked at their arguments alone: what they compute, and how they are placed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import placed

pytestmark = pytest.mark.exact_plans


@pytest.mark.usefixtures("devices8")
def test_the_free_plan_computes_the_same_and_sends_no_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def once(_: Any, run: Any, args: Any) -> float:
        ran.append(type(run).__name__)
        return 1.0

    monkeypatch.setattr(placed, "milliseconds", once)
    names = ["fft2", "mlp-gradient"]
    placed.main(["--programs", ",".join(names), "--scale", "64"])
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    assert [row[0] for row in rows] == names and len(ran) == 3 * len(names)
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        assert float(cells["apart"]) < 1e-5, row
        assert float(cells["free, predicted ms"]) <= float(cells["by hand, predicted ms"]), row
