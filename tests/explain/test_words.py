"""Sizes, times, sources, shardings and prices as text."""

import pytest

from spmd.explain.prices import Price
from spmd.explain.words import bytes_text, seconds_text, source_text, spec_text
from spmd.mesh.mesh import Mesh
from tests.mesh.shardings import parse_sharding


def test_numbers_and_sources_as_text() -> None:
    assert [bytes_text(n) for n in (0, 1000, 1536, 200 << 20, 3 << 40)] == [
        "0 B", "1000 B", "1.5 KiB", "200 MiB", "3 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (2, 0.0125, 3e-6)] == ["2 s", "12.5 ms", "3 us"]
    assert [seconds_text(s) for s in (1234, 0.9996, 9.996e-4, 9.994e-4, 0, 2e-9)] == [
        "1234 s", "1 s", "1 ms", "999 us", "0 us", "0.002 us",
    ]  # fmt: skip
    assert source_text("/a/b/c/d.py:3 (f.<locals>.g)") == "c/d.py:3 (g)"
    assert source_text("mark at /a/b/c.py:3 (f)") == "mark at b/c.py:3 (f)"
    assert source_text("argument params/layers/0/w") == "argument params/layers/0/w"


def test_shardings_as_specs() -> None:
    mesh = Mesh(None, (4, 2), ("data", "model"))

    def text(sharding: str) -> str:
        return spec_text(parse_sharding(sharding, mesh), mesh)

    assert text("[{data}, {}]") == '("data", None)'
    assert text("[{model, data}]") == '(("model", "data"),)'
    assert text("[{}, {}]") == "replicated"
    assert text("[]") == "scalar"
    assert text("[{data:(1)2}] partial add {model}") == '("data:(1)2",) partial add over model'


@pytest.mark.parametrize(
    ("seconds", "count", "text"),
    [
        (0.0, 0, "costs the same"),
        (1e-3, 1024, "1 ms more, 1 KiB more sent"),
        (-1e-3, -1024, "1 ms less, 1 KiB less sent"),
        (1e-3, -1024, "1 ms more, but 1 KiB less sent"),
        (1e-3, 0, "1 ms more, the same bytes sent"),
        (0.0, 5, "the same time, 5 B more sent"),
    ],
)
def test_prices_as_text(seconds: float, count: int, text: str) -> None:
    assert Price(seconds, count).text == text
