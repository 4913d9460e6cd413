"""Minimum cuts: the cheapest edges to cut so that nothing leads from the source to the sink."""

from collections.abc import Collection

import numpy as np

SOURCE, SINK = 0, 1

RESOLUTION, ENDLESS = 10**9, 2 * 10**9
"""Capacities become integers that sum to `RESOLUTION`; infinite ones become `ENDLESS`."""


class FlowNetwork:
    """A directed graph from `SOURCE` to `SINK`, to be cut where edges cost the least seconds."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {SOURCE: SOURCE, SINK: SINK}
        self.edges: list[tuple[int, int, float]] = []

    def edge(self, start: object, end: object, seconds: float) -> None:
        """Adds an edge: `seconds` to cut if `start` is on the source's side and `end` is not."""
        if seconds:
            a, b = (self.numbers.setdefault(node, len(self.numbers)) for node in (start, end))
            self.edges.append((a, b, seconds))

    def seconds(self, behind: Collection[object]) -> float:
        """Returns the seconds of the cut that has just the nodes `behind` on the sink's side."""
        names = list(self.numbers)
        ends = ((names[a] in behind, names[b] in behind, cost) for a, b, cost in self.edges)
        return sum(cost for start, end, cost in ends if end and not start)

    def behind_cut(self) -> set[object]:
        """Returns the nodes on the sink's side of the cheapest cut (fewest if equal) and `SINK`."""
        if not self.edges:
            return set()
        # Imported late: few programs make values again, and all wait for their imports.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        starts, ends, seconds = (np.array(column) for column in zip(*self.edges, strict=True))
        total = float(seconds[np.isfinite(seconds)].sum()) or 1.0
        scaled = np.minimum(np.ceil(seconds * (RESOLUTION / total)), ENDLESS)
        count = len(self.numbers)
        capacities = csr_array((scaled.astype(np.int64), (starts, ends)), shape=(count, count))
        capacities.sum_duplicates()
        capacities.data = np.minimum(capacities.data, ENDLESS).astype(np.int32)
        left = capacities.astype(np.int64) - maximum_flow(capacities, SOURCE, SINK).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = breadth_first_order(left.T.tocsr(), SINK, return_predecessors=False)
        names = list(self.numbers)
        return {names[i] for i in reached}
