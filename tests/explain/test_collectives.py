"""Collectives of a report: rows and totals."""

from typing import Any

import pytest

from benchmarks.hlo.collectives import hlo_collectives
from spmd.explain.costs import Collective, collective_rows, traffic


def test_equal_collectives_are_one_row_and_no_byte_is_lost() -> None:
    one = Collective("all_gather", ("data",), 100, 4, "t.py:1", "because", 1e-6, "layer")
    other = one._replace(source="t.py:2", bytes=1000)
    rows = collective_rows([one, other, one])
    assert [(row.like.source, row.ops, row.bytes) for row in rows] == [
        ("t.py:2", 1, 4000),
        ("t.py:1", 2, 800),
    ]
    (total,) = traffic([one, other, one])
    assert (total.ops, total.runs, total.bytes) == (3, 12, 4800)
    assert total.seconds == pytest.approx(12e-6)


def test_xla_moves_the_bytes_that_the_plan_says(compiled: Any) -> None:
    totals: dict[str, int] = {}
    for c in compiled.collectives:
        totals[c.kind] = totals.get(c.kind, 0) + c.bytes * c.count
    for c in hlo_collectives(compiled.as_text("hlo")):
        totals[c.kind] -= c.bytes * c.count
    assert totals == dict.fromkeys(totals, 0)
