"""Dead-end elimination: states that another state undercuts whatever the neighbours do.

Goldstein 1994, "Efficient rotamer elimination applied to protein side-chains and related spin
glasses".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from spmd.planning.solver.network import Network, Table

MOST_STATES = 40
"""Variables with more states are left alone: all pairs of states, against all of a neighbour's."""

_LOWER = np.tri(MOST_STATES, k=-1, dtype=bool)
"""Whether the state of a column has a lower number than that of a row."""


def undominated(network: Network, keep: Collection[int] = ()) -> list[Table]:
    """For each variable the states that no other state of it always undercuts, or equals.

    Args:
      network: the network.
      keep: variables that keep all of their states.
    """
    # Tables have a neighbour's states in rows and a variable's own in columns: numpy is fastest at
    # taking the minimum over rows.
    alive = [np.arange(len(costs)) for costs in network.unary]
    around: list[list[tuple[int, Table]]] = [[] for _ in network.unary]
    for (u, v), table in network.pairs.items():
        around[u].append((v, np.ascontiguousarray(table.T)))
        around[v].append((u, table))
    for v, mine in enumerate(alive):
        # Variables with fewer neighbours are eliminated, which is sooner done.
        if v in keep or len(around[v]) < 3 or not 1 < len(mine) <= MOST_STATES:
            continue
        seen = [table[alive[u]] for u, table in around[v]]
        alive[v] = mine[~_undercut(network.unary[v], seen)]
    return alive


def _undercut(own: Table, around: Sequence[Table]) -> Table:
    """For each state of a variable, whether another one is never worse, or equal and in front.

    Args:
      own: costs of the states.
      around: for each neighbour, a row for each of its states, a column for each of these.
    """
    # What a state costs more than another one at least, over all that a neighbour may do, takes the
    # neighbour's states times all pairs. It is no more than where the neighbour does what suits the
    # state best. Few pairs are left where even that is no loss, and are looked into.
    #
    # Sums of rounded numbers: of a circle of states, each undercut by the next, one must stay. So
    # states are also in order of what they cost beside the neighbours' first states.
    order, most = own, own[:, None] - own
    columns = np.arange(len(own))
    for seen in around:
        order = order + seen[0]
        suited = seen[seen.argmin(axis=0)]
        most = most + (suited[columns, columns][:, None] - suited)
    behind = order[:, None] > order
    tied = (order[:, None] == order) & _LOWER[: len(own), : len(own)]
    rows, others = np.nonzero((most >= 0) & (behind | tied))
    worse = own[rows] - own[others]
    for seen in around:
        worse = worse + np.minimum.reduce(seen[:, rows] - seen[:, others])
    loses = np.zeros(len(own), dtype=bool)
    loses[rows[worse >= 0]] = True
    return loses
