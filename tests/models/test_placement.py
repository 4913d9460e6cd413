"""Specs written without a mesh: axes that it lacks, dims that they do not divide; progress bars."""

import io

import pytest
from rich.console import Console

from spmd.models.placement import OPEN, fitted
from spmd.models.progress import bytes_bar

SHAPE = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("spec", "sizes", "wanted"),
    [
        (("data", "model"), (4, 8), ("data", "model")),
        (("replica", ("replica", "data", "model")), (4, 8), (None, ("data", "model"))),
        ((("replica", "data"),), (4, 8), ("data", None)),
        ((OPEN, ...), (4, 8), (..., ...)),
        (("model",), (0,), ("model",)),
    ],
)
def test_what_fits(spec, sizes, wanted):
    assert fitted("w", spec, sizes, SHAPE) == (wanted, ())


def test_what_does_not_divide_is_open_or_whole_and_named():
    spec, sizes = (("data", "model"), "model"), (12, 8)
    why = "w: data=2 x model=4 does not divide 12 (dim 0), which "
    opened = fitted("w", spec, sizes, SHAPE)
    assert opened == ((..., "model"), (f"{why}is left to the compiler",))
    whole = fitted("w", spec, sizes, SHAPE, otherwise=None)
    assert whole == ((None, "model"), (f"{why}stays whole",))


LONG = 2**30


def shown(total, **terminal):
    printed = io.StringIO()
    console = Console(file=printed, width=80, **terminal)
    with bytes_bar("loading weights", total, console) as advance:
        advance(total // 2)
    return printed.getvalue()


def test_a_long_transfer_has_a_bar_on_a_terminal_and_none_elsewhere():
    text = shown(LONG, force_terminal=True)
    assert "loading weights" in text
    assert "0.5/1.1 GB" in text
    assert shown(LONG, force_terminal=False) == ""
    assert shown(1000, force_terminal=True) == ""
    with bytes_bar("loading weights", LONG, None) as advance:
        advance(1)
