"""The solver of cost networks, beside every joint state of small random networks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.planning.solver import FORBIDDEN, Elimination, Network, Passing, solve


def random_network(seed: int, forbidden: float = 0.1, count: int | None = None) -> Network:
    """Up to six variables of up to four states, most pairs with costs, some of them forbidden."""
    rng = np.random.RandomState(seed)
    network = Network()
    sizes = rng.randint(1, 5, count or rng.randint(1, 7))
    for size in sizes:
        network.variable(rng.randint(0, 9, size).astype(float))
    for u, v in itertools.combinations(range(len(sizes)), 2):
        if rng.rand() < 0.7:
            costs = rng.randint(0, 9, (sizes[u], sizes[v])).astype(float)
            costs[rng.rand(*costs.shape) < forbidden] = FORBIDDEN
            network.pair(u, v, costs)
    return network


def least(network: Network) -> float:
    joint = itertools.product(*(range(len(costs)) for costs in network.unary))
    return min(network.cost(states) for states in joint)


@given(st.integers(0, 10**6))
def test_what_cannot_be_eliminated_after_all(seed: int) -> None:
    """It is guessed before; some tables turn out to be larger, or to have no costs."""
    network = random_network(seed, forbidden=0.0, count=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Elimination, "fits", lambda *_: True)
        found = solve(network, limit=32)
    assert found.lower <= (best := least(network)) + 1e-9
    assert found.cost == network.cost(found.states) >= best - 1e-9


@given(st.integers(0, 10**6), st.none() | st.integers(0, 10**6))
def test_the_solution_is_the_cheapest_joint_state_of_those_allowed(
    seed: int, other: int | None
) -> None:
    network, allowed = random_network(seed), None
    if other is not None:
        rng = np.random.RandomState(other)
        found = [np.flatnonzero(rng.rand(len(costs)) < 0.6) for costs in network.unary]
        allowed = [states if len(states) else np.zeros(1, dtype=int) for states in found]
    solution = solve(network, allowed)
    best = least(network if allowed is None else network.restricted(allowed))
    if allowed is not None:
        assert all(s in states for s, states in zip(solution.states, allowed, strict=True))
    if best < FORBIDDEN:
        assert solution.exact
        assert solution.cost == network.cost(solution.states) == pytest.approx(best)
    else:  # everything is forbidden, and no matter how often
        assert solution.cost >= FORBIDDEN


@given(st.integers(0, 10**6), st.none() | st.integers(0, 10**6), st.sampled_from([0, 1 << 18]))
def test_bounds_hold_and_a_known_state_is_undercut_wherever_that_is_possible(
    seed: int, other: int | None, limit: int
) -> None:
    """Tables may have no entry: only message passing is left behind the easy variables."""
    network, known = random_network(seed, forbidden=0.0), None
    if other is not None:
        rng = np.random.RandomState(other)
        known = [rng.randint(len(costs)) for costs in network.unary]
    found, best = solve(network, known=known, limit=limit), least(network)
    assert found.lower <= best + 1e-9
    assert best - 1e-9 <= found.cost == network.cost(found.states)
    assert known is None or found.cost <= network.cost(known)
    assert solve(network, known=found.states, limit=limit).cost == found.cost
    if limit:
        assert found.cost == pytest.approx(best)


@given(st.integers(0, 10**6))
def test_what_is_close_enough_is_close(seed: int) -> None:
    network = random_network(seed, forbidden=0.0)
    network.variable([100.0])  # so that shares are of about as much
    found = solve(network, close=0.1)
    assert found.lower <= least(network) + 1e-9
    assert found.cost <= least(network) * 1.2


@given(st.integers(0, 10**6))
def test_messages_move_costs_and_change_no_sum(seed: int) -> None:
    network = random_network(seed, forbidden=0.0)
    passing = Passing(network)
    passing.run()
    shifted = passing.shifted()
    for states in itertools.product(*(range(len(costs)) for costs in network.unary)):
        assert shifted.cost(states) == pytest.approx(network.cost(states))
