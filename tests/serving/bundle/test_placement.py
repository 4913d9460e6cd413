"""A manifest's specs on a mesh."""

import spmd
from serving.bundle.manifest import Leaf
from serving.bundle.placement import spec_for

MESH = spmd.Mesh(None, (2, 4), ("data", "model"))


def test_the_first_pattern_counts_on_the_refined_mesh():
    specs = {"a/*": ("model", "..."), "a/w": ("data", None), "b": ("replica",)}
    found = spec_for(Leaf("a/w", (8, 8), "float32"), specs, MESH)
    assert found == ((("model.0", "model.1"), ...), ())
    assert spec_for(Leaf("b", (8,), "float32"), specs, MESH) == ((None,), ())
    assert spec_for(Leaf("c", (8,), "float32"), specs, MESH) is None
