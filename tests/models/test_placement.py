"""Specs written without a mesh: axes that a mesh lacks, dims that its axes do not divide."""

import pytest

import spmd
from models.placement import OPEN, fitted, on_refined

MESH = spmd.Mesh(None, (2, 4), ("data", "model"))


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
    assert fitted("w", spec, sizes, MESH.shape) == (wanted, ())


def test_what_does_not_divide_is_open_or_whole_and_named():
    spec, sizes = (("data", "model"), "model"), (12, 8)
    why = "w: data=2 x model=4 does not divide 12 (dim 0), which "
    opened = fitted("w", spec, sizes, MESH.shape)
    assert opened == ((..., "model"), (f"{why}is left to the compiler",))
    whole = fitted("w", spec, sizes, MESH.shape, otherwise=None)
    assert whole == ((None, "model"), (f"{why}stays whole",))


def test_the_first_pattern_counts_on_the_refined_mesh():
    specs = {"a/*": ("model", OPEN), "a/w": ("data", None), "b": ("replica",)}
    found = on_refined("a/w", (8, 8), specs, MESH)
    assert found is not None
    assert found.spec == (("model.0", "model.1"), ...)
    assert on_refined("b", (8,), specs, MESH) == ((None,), ())
    assert on_refined("c", (8,), specs, MESH) is None
