"""Specs of arguments and results, as `spmd.jit` takes them."""

from __future__ import annotations

import numpy as np
from jax.sharding import PartitionSpec as P

import spmd


def test_results_and_their_shardings_follow_the_specs(mesh: spmd.Mesh) -> None:
    step = spmd.jit(
        lambda x, w: {"y": x @ w, "sum": x.sum()},
        mesh=mesh,
        in_specs=(("data", None), (None, "model")),
        out_specs={"y": ("data", "model"), "sum": ()},
    )
    x, w = np.arange(64.0).reshape(8, 8), np.ones((8, 4))
    x, w = x.astype(np.float32), w.astype(np.float32)
    out = step(x, w)
    np.testing.assert_allclose(out["y"], x @ w)
    np.testing.assert_allclose(out["sum"], x.sum())
    assert out["y"].sharding.spec == P("data", "model")
    assert out["sum"].sharding.is_fully_replicated


def test_a_spec_for_each_of_several_results(mesh: spmd.Mesh) -> None:
    for specs in [(("data",), None), [("data",), ("model",)], (("data", "model"), ())]:
        step = spmd.jit(lambda x: (x * 2, x + 1), mesh=mesh, out_specs=specs)
        doubled, _ = step(np.ones((8, 8), np.float32))
        assert doubled.sharding.spec[0] == "data"


def test_specs_in_lists_inside_dicts(mesh: spmd.Mesh) -> None:
    specs = {"a": [P("data"), P(None, "model")], "b": P("model")}
    tree = {"a": [np.ones((8, 8), np.float32)] * 2, "b": [np.ones((8, 8), np.float32)]}
    step = spmd.jit(lambda tree: tree, mesh=mesh, in_specs=(specs,), out_specs=specs)
    out = step(tree)
    found = [tuple(leaf.sharding.spec) for leaf in (*out["a"], *out["b"])]
    assert [spec + (None,) * (2 - len(spec)) for spec in found] == [
        ("data", None), (None, "model"), ("model", None)
    ]  # fmt: skip
