"""The solver of cost networks, beside every joint state of small random networks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.planning.solver.network import FORBIDDEN, Network
from spmd.planning.solver.solve import Solution, solve


def random_network(seed: int, forbidden: float = 0.1) -> Network:
    """Up to six variables of up to four states, most pairs with costs, some of them forbidden."""
    rng = np.random.RandomState(seed)
    network = Network()
    sizes = rng.randint(1, 5, rng.randint(1, 7))
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
def test_the_solution_is_the_cheapest_joint_state(seed: int) -> None:
    network = random_network(seed)
    found = solve(network)
    assert found.exact
    assert found.cost == network.cost(found.states) == pytest.approx(least(network))


@given(st.integers(0, 10**6))
def test_without_elimination_both_bounds_hold(seed: int) -> None:
    """Tables may have no entry, so only message passing is left behind the easy variables."""
    network = random_network(seed, forbidden=0.0)
    found: Solution = solve(network, limit=0)
    best = least(network)
    assert found.lower <= best + 1e-9
    assert found.cost >= best - 1e-9
