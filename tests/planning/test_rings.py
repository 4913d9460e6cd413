"""Factors whose pieces may go round: which assignments are legal, found, and what they cost."""

import pytest

import spmd
from spmd.ir.dialect.rule import PASS, REDUCE, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import TensorType
from spmd.mesh.sharding import Sharding
from spmd.planning.choices import assignments_around, placements, plain_choice
from spmd.predict.ops import op_seconds
from spmd.propagation.projection import is_legal_assignment, unsplit

MESH = spmd.Mesh(None, (4, 2), ("x", "y"))
X, Y = MESH.axis_atoms["x"], MESH.axis_atoms["y"]


def ring_rule(queries: int = 16, keys: int = 32, wanted: int = 0, kind: str = PASS) -> Rule:
    """`s d, t d -> s d, t d`, where the second operand's pieces may go round."""
    build = RuleBuilder()
    s, d = build.factor(queries, kind), build.factor(8)
    t = build.ring(keys, s, wanted)
    return build.build([[s, d], [t, d]], [[s, d], [t, d]], reduction="add")


def test_a_ring_has_the_atoms_of_the_factor_that_it_goes_along() -> None:
    sizes, rule = MESH.atom_sizes, ring_rule()
    assert str(rule) == "i j, k j -> i j, k j {k: ring along i}"
    for good in ((X, (), ()), (X, (), X), (X, Y, X), ((), X, ()), ((*X, *Y), (), (*X, *Y))):
        assert is_legal_assignment(rule, good, sizes), good
    for bad in ((X, (), Y), ((), (), X), (X, (), X[:1]), (X, X, X)):
        assert not is_legal_assignment(rule, bad, sizes), bad
    assert not is_legal_assignment(ring_rule(queries=18), (X, (), X), sizes), "uneven"
    assert not is_legal_assignment(ring_rule(keys=34), (X, (), X), sizes), "uneven"
    assert not is_legal_assignment(ring_rule(wanted=2), (X, (), X), sizes), "another order"
    assert is_legal_assignment(ring_rule(wanted=4), (X, (), X), sizes)


def test_planners_are_offered_both_ways() -> None:
    rule = ring_rule()
    for split in (
        placements(rule, unsplit(rule), list(MESH.axis_atoms.values()), MESH.atom_sizes),
        around(rule),
    ):
        assert (X, (), ()) in split and (X, (), X) in split
        assert len(set(split)) == len(split)
        assert all(is_legal_assignment(rule, each, MESH.atom_sizes) for each in split)
    assert (X, (), X) not in around(ring_rule(wanted=2))


def around(rule: Rule) -> list[tuple[tuple[int, ...], ...]]:
    states = (Sharding((X, ())),), (Sharding((X, ())),), (), ()
    return list(assignments_around(rule, states, MESH.atom_sizes))


def test_sums_that_go_round_are_not_owed() -> None:
    rule = ring_rule(kind=REDUCE)
    gathered = plain_choice(rule, (X, (), ()), MESH)
    round_ = plain_choice(rule, (X, (), X), MESH)
    assert gathered.operands[1].dims == ((), ()) and gathered.results[1].partial == tuple(sorted(X))
    assert round_.operands[1].dims == (X, ()) and round_.results[1] == Sharding((X, ()))
    assert round_.results[0] == gathered.results[0] == Sharding((X, ()))


@pytest.mark.parametrize("topology", ["h200:8", "v5p:2x2x2"])
def test_going_round_costs_what_arithmetic_does_not_hide(topology: str) -> None:
    types = TensorType((1 << 16, 8), "f32"), TensorType((1 << 17, 8), "f32")
    kind, machine = OpKind("test.ring", types, types, {}), spmd.Topology(topology)
    rule = ring_rule(1 << 16, 1 << 17)
    whole, split = (
        op_seconds(kind, rule, assignment, MESH, machine)
        for assignment in ((X, (), ()), (X, (), X))
    )
    # This op does no arithmetic: three hops of two pieces of a MiB, and nothing hides them.
    link = machine.link(MESH, 0)
    assert split > whole and split > 3 * 2 * 2**20 / (8 * link.bandwidth)
