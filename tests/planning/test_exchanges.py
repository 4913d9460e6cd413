"""Factors that atoms of others may split, too: which assignments are legal, and what they cost."""

import pytest

import spmd
from spmd.ir.dialect.rule import REDUCE, Exchange, Rule, RuleBuilder
from spmd.mesh.sharding import Sharding
from spmd.planning.choices import assignments_around, placements, plain_choice
from spmd.predict.ops import exchange_seconds
from spmd.propagation.projection import is_legal_assignment, unsplit

MESH = spmd.Mesh(None, (4, 2), ("x", "y"))
X, Y = MESH.axis_atoms["x"], MESH.axis_atoms["y"]
SENT = 8e9


def exchanging_rule(experts: int = 8) -> Rule:
    """`b h, e h -> b h, e h`, both results sums, where `e` may be split along `b`."""
    build = RuleBuilder()
    b, h, e = build.factor(16, REDUCE), build.factor(4), build.factor(experts, REDUCE)
    rule = build.build([[b, h], [e, h]], [[b, h], [e, h]], reduction="add")
    return rule.with_exchange(e[0], Exchange(b, SENT))


def test_what_may_be_split_by_others_atoms_and_is_offered() -> None:
    rule, sizes = exchanging_rule(), MESH.atom_sizes
    for good in ((X, (), X), ((*X, *Y), (), Y), ((*X, *Y), (), X), (X, (), Y), ((), (), X)):
        assert is_legal_assignment(rule, good, sizes), good
    for bad in ((X, X, ()), (X, X, X), (X, Y, (*X, *Y)), (X, (), (*X, *Y))):
        assert not is_legal_assignment(rule, bad, sizes), bad
    assert not is_legal_assignment(exchanging_rule(6), (X, (), X), sizes), "uneven"
    assert is_legal_assignment(exchanging_rule(6), (X, (), Y), sizes)
    rule, sizes = exchanging_rule(), MESH.atom_sizes
    states = (Sharding(((*X, *Y), ())),), (Sharding((Y, ())),), (), ()
    around = assignments_around(rule, states, sizes)
    assert ((*X, *Y), (), Y) in around and ((*X, *Y), (), ()) in around
    assert ((*X, *Y), (), X) not in around
    every = placements(rule, unsplit(rule), list(MESH.axis_atoms.values()), MESH.atom_sizes)
    assert ((*X, *Y), (), Y) in every and ((*X, *Y), (), X) in every
    assert len(set(every)) == len(every)
    assert all(is_legal_assignment(rule, each, sizes) for each in (*around, *every))


def test_sums_are_owed_over_what_splits_neither_and_what_it_costs() -> None:
    choice = plain_choice(exchanging_rule(), ((*X, *Y), (), Y), MESH)
    first, second = choice.results
    assert not first.partial, "each device has its rows' sums"
    assert second.dims == (Y, ()) and second.partial == X
    rule, switch = exchanging_rule(), spmd.Topology("a100:8")
    none, all_ = (exchange_seconds(rule, a, MESH, switch) for a in ((X, (), ()), (X, (), X)))
    link = switch.chip.ici.bandwidth
    wire, memory = SENT / 4 * 3 / 4 / link, 2 * SENT / 4 / switch.hbm_bandwidth
    assert none == 0
    assert all_ == pytest.approx(wire + memory, rel=2e-3), "but for latency"


@pytest.mark.parametrize(
    ("topology", "sizes", "detour"),
    [
        ("h200:8", (8,), 1),
        ("v4:4x4x4", (64,), 3),
        ("v5p:8x8x8", (8, 64), 4),
        ("v4:4x4x4", (16, 4), 1),
        ("v5p:4x4x4", (8, 8), 1),
    ],
)
def test_messages_take_longer_through_a_torus(
    topology: str, sizes: tuple[int, ...], detour: float
) -> None:
    mesh = spmd.Mesh(None, sizes, ("x", "y")[: len(sizes)])
    assert spmd.Topology(topology).detour(mesh, len(sizes) - 1) == detour
