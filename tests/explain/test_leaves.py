"""Arguments and results of a report: those that are alike stand together."""

from typing import Any

from spmd.explain.data import Leaf
from spmd.explain.facts import group_leaves, pattern
from spmd.ir.types import TensorType
from spmd.mesh.sharding import Sharding


def leaf(name: str, dims: Any = ((0,), ()), origin: str = "marked") -> Leaf:
    type_ = TensorType((8, 8), "f32")
    return Leaf(name, type_, str(dims), Sharding(dims), type_, origin)


def test_leaves_that_are_alike_are_one_group_with_a_pattern() -> None:
    names = [f"p/{i}/{m}/{w}/x" for m in ("mu", "nu") for w in "ab" for i in range(20)]
    (group,) = group_leaves(leaf(name) for name in names)
    assert pattern(x.name for x in group) == "p/*/{mu,nu}/{a,b}/x"
    assert len(group) == 80
    assert pattern(["a/1/w", "a/12/w"]) == "a/*/w"
    assert pattern(["a", "a"]) == "a"
    assert pattern(["a/b", "c"]) == "a/b and 1 more"


def test_other_leaves_are_groups_of_their_own() -> None:
    names = ["p/mu/a/x", "p/mu/b/x", "p/nu/a/x"]
    groups = group_leaves(leaf(name) for name in names)
    assert [pattern(x.name for x in group) for group in groups] == names
    leaves = [
        leaf("p/0/w"), leaf("p/1/w", ((), (0,))), leaf("p/2/w", origin="from argument q"),
        leaf("p/3/b"), leaf("q/0/w"),
    ]  # fmt: skip
    assert group_leaves(leaves) == [[x] for x in leaves]
