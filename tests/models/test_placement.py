"""Specs written without a mesh: axes that a mesh lacks, dims that its axes do not divide."""

import pytest

from models.placement import OPEN, fitted

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
