"""Factors whose pieces may go round: which assignments are legal."""

import spmd
from spmd.ir.dialect.rule import Rule, RuleBuilder
from spmd.propagation.projection import is_legal_assignment

MESH = spmd.Mesh(None, (4, 2), ("x", "y"))
X, Y = MESH.axis_atoms["x"], MESH.axis_atoms["y"]


def ring_rule(queries: int = 16, keys: int = 32, wanted: int = 0) -> Rule:
    """`s d, t d -> s d, t d`, where the second operand's pieces may go round."""
    build = RuleBuilder()
    s, d = build.factor(queries), build.factor(8)
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
