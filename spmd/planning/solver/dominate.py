"""Dead-end elimination: states that another state undercuts whatever the neighbours do.

Goldstein 1994, "Efficient rotamer elimination applied to protein side-chains and related spin
glasses".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

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
    queue = deque(v for v, kept in enumerate(alive) if 1 < len(kept) <= MOST_STATES)
    queued = set(queue)
    while queue:
        v = queue.popleft()
        queued.discard(v)
        mine = alive[v]
        if len(mine) == 1 or v in keep:
            continue
        # Sums of rounded numbers: of a circle of states, each undercut by the next, one must stay.
        order = network.unary[v][mine]
        worse = order[:, None] - order[None, :]
        for u, table in around[v]:
            seen = table[alive[u][:, None], mine]
            order = order + seen[0]
            worse = worse + np.minimum.reduce(seen[:, :, None] - seen[:, None, :])
        behind = order[:, None] > order[None, :]
        lower_number = _LOWER[: len(mine), : len(mine)]
        loses = (worse >= 0) & (behind | ((order[:, None] == order[None, :]) & lower_number))
        if loses.any():
            alive[v] = mine[~loses.any(axis=1)]
            for u, _ in around[v]:
                if u not in queued and len(alive[u]) <= MOST_STATES:
                    queued.add(u)
                    queue.append(u)
    return alive
