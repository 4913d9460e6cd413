"""The cheapest joint state of a network: variables with a few states each, and costs of pairs.

minimise   sum_v unary_v[x_v]  +  sum_(u,v) pair_uv[x_u, x_v]

Variables with one or two neighbours are eliminated; of what is left, message passing bounds the
cost from below and finds states from above; states that the gap leaves no room for are dropped,
and the network of the rest, which is smaller, is treated likewise. Where a network is small enough
elimination settles it. Where none gets so small, the best state seen is returned with the lower
bound: people can see how far from the best it is at most.

Nothing depends on the clock or on hash order: every process finds the same.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

Table = np.ndarray

FORBIDDEN = 1e9  # a cost that no solution has; finite, so that differences of costs stay numbers


class Network:
    """An optimization problem: variables, costs of each one's states, and of pairs of states."""

    def __init__(self) -> None:
        self.unary: list[Table] = []  # for each variable the cost of each state
        # (u, v) with u < v -> costs, a row for each state of u
        self.pairs: dict[tuple[int, int], Table] = {}

    def variable(self, costs: Sequence[float] | Table) -> int:
        """Adds a variable, given the cost of each of its states, and returns its number."""
        self.unary.append(np.array(costs, dtype=float))
        return len(self.unary) - 1

    def pair(self, u: int, v: int, costs: Table) -> None:
        """Adds costs of the states of u (rows) and v (columns) together; `u` may be `v`."""
        if u == v:
            self.unary[u] += np.diagonal(costs)
        elif len(self.unary[u]) == 1:
            self.unary[v] += costs[0]
        elif len(self.unary[v]) == 1:
            self.unary[u] += costs[:, 0]
        else:
            key, costs = ((u, v), costs) if u < v else ((v, u), costs.T)
            found = self.pairs.get(key)
            self.pairs[key] = costs if found is None else found + costs

    def cost(self, states: Sequence[int]) -> float:
        """Returns the cost of a joint state, given each variable's state: own costs and pairs."""
        total = sum(float(costs[s]) for costs, s in zip(self.unary, states, strict=True))
        return total + sum(float(t[states[u], states[v]]) for (u, v), t in self.pairs.items())

    def restricted(self, alive: Sequence[Table]) -> "Network":
        """Returns the network with only the states `alive[v]`, by number, of each variable v."""
        smaller = Network()
        for costs, kept in zip(self.unary, alive, strict=True):
            smaller.variable(costs[kept])
        for (u, v), table in self.pairs.items():
            smaller.pair(u, v, table[alive[u][:, None], alive[v]])
        return smaller


# Elimination: variables are replaced by their best responses, one after another. The one whose
# neighbours have the fewest joint states goes first (bucket elimination, Dechter 1999; with one or
# two neighbours these are the reductions of partitioned boolean quadratic programming, Scholz and
# Eckstein 2002). What is found is exact as far as it goes.

Joint = tuple[int, ...]  # variables of one factor, ascending


class Elimination:
    """A network whose variables are removed in turn; what their best states cost goes to others."""

    def __init__(self, network: Network) -> None:
        self.constant = 0.0  # of variables that are gone with all of their neighbours
        self.unary = list(network.unary)
        self.sizes = [len(costs) for costs in self.unary]
        self.factors: dict[Joint, Table] = {}  # costs of joint states
        self.touching: list[dict[Joint, None]] = [{} for _ in self.unary]  # factors of a variable
        # Variables that are gone, with their costs and the factors that they had with others.
        self.done: list[tuple[int, Table, list[tuple[Joint, Table]]]] = []
        self.left = set(range(len(self.unary)))
        for (u, v), table in network.pairs.items():
            if table.any():
                self._add((u, v), table)

    def run(self, limit: int, neighbours: int = 1 << 30, keep: Collection[int] = ()) -> bool:
        """Eliminates variables as long as no table of costs gets more than `limit` entries.

        Variables with more than `neighbours` neighbours stay, and so do those in `keep`. Returns
        whether nothing is left.
        """
        heap = [(self._width(v), v) for v in self.left]
        heapq.heapify(heap)
        while heap:
            width, v = heapq.heappop(heap)
            if v not in self.left or width != self._width(v):
                continue
            if width > limit:
                break
            if len(self._near(v)) > neighbours or v in keep:
                continue
            # All that touches the variable is replaced by its best response.
            near = tuple(sorted(self._near(v)))
            factors = [(variables, self._pop(variables)) for variables in tuple(self.touching[v])]
            self.done.append((v, self.unary[v], factors))
            self.left.discard(v)
            # One dim for each neighbour, in ascending order, behind that of the variable.
            total = self.unary[v].reshape(-1, *[1] * len(near))
            for variables, table in factors:
                at = variables.index(v)
                front = table.transpose(at, *[i for i in range(table.ndim) if i != at])
                index = [slice(None), *[slice(None) if u in variables else None for u in near]]
                total = total + front[tuple(index)]
            costs = np.minimum.reduce(total)
            if not near:
                self.constant += float(costs)
            elif len(near) == 1:
                self.unary[near[0]] = self.unary[near[0]] + np.minimum(costs, FORBIDDEN)
            elif costs.any():
                self._add(near, np.minimum(costs, FORBIDDEN))
            for u in near:
                heapq.heappush(heap, (self._width(u), u))
        return not self.left

    def fits(self, limit: int) -> bool:
        """Returns whether `run(limit)` may well eliminate all variables; changes nothing."""
        near = [self._near(v) for v in range(len(self.sizes))]

        def width(v: int) -> int:
            return math.prod([self.sizes[u] for u in near[v]], start=self.sizes[v])

        left = set(self.left)
        heap = [(width(v), v) for v in left]
        heapq.heapify(heap)
        while heap:
            entries, v = heapq.heappop(heap)
            if v not in left or entries != width(v):
                continue
            if entries > limit:
                return False
            left.discard(v)
            for u in near[v]:
                near[u] |= near[v]
                near[u] -= {u, v}
                heapq.heappush(heap, (width(u), u))
        return True

    def core(self) -> Network:
        """Returns what is left as a network; none that is gone may have had over two neighbours."""
        core = Network()
        number = {v: core.variable(self.unary[v]) for v in sorted(self.left)}
        for (u, v), table in self.factors.items():
            core.pair(number[u], number[v], table)
        return core

    def unwound(self, known: Mapping[int, int]) -> list[int]:
        """Returns the best state of every variable, given those of the variables that are left."""
        states = [known.get(v, 0) for v in range(len(self.sizes))]
        for variable, total, factors in reversed(self.done):
            for variables, table in factors:
                row = [slice(None) if u == variable else states[u] for u in variables]
                total = total + table[tuple(row)]
            states[variable] = int(total.argmin())
        return states

    def _add(self, variables: Joint, table: Table) -> None:
        if variables in self.factors:
            table = table + self._pop(variables)
        self.factors[variables] = table
        for v in variables:
            self.touching[v][variables] = None

    def _pop(self, variables: Joint) -> Table:
        for v in variables:
            del self.touching[v][variables]
        return self.factors.pop(variables)

    def _near(self, v: int) -> set[int]:
        return {u for variables in self.touching[v] for u in variables if u != v}

    def _width(self, v: int) -> int:
        return math.prod([self.sizes[u] for u in self._near(v)], start=self.sizes[v])


# Lower bounds by message passing: which states of a network's variables no best solution has.
#
# Tree-reweighted message passing (Kolmogorov 2006) moves costs between variables and pairs,
# changing no sum, until the sum of everyone's own least cost is as large as it gets: a lower bound.
# A state whose own excess over it is more than some known solution has left to lose can be dropped.

SWEEPS = 6  # of a round


class _Edge(NamedTuple):
    """A pair of variables, seen from one: the other, the pair's costs, and messages both ways."""

    other: int
    costs: Table  # a row for each of its own states: numpy takes the minimum over rows fastest
    got: Table  # the message from the other variable, changed in place
    sent: Table  # and the one to it


def likely_states(network: Network, most: float) -> list[tuple[int, int]]:
    """Returns (variable, state) for each state that joint states of cost `most` or less may have.

    Variables with one state are left out. States that must raise the cost the least come first.
    """
    passing = Passing(network)
    passing.run()
    lower, excess = passing.bound()
    found = sorted(
        (float(more), v, state)
        for v, costs in enumerate(excess)
        if len(costs) > 1
        for state, more in enumerate(costs)
        if lower + more <= most
    )
    return [(v, state) for _, v, state in found]


class Passing:
    """Message passing (belief propagation) on a network, for lower bounds and good joint states."""

    def __init__(self, network: Network) -> None:
        self.network, self.unary = network, network.unary
        self.earlier: list[list[_Edge]] = [[] for _ in network.unary]
        self.later: list[list[_Edge]] = [[] for _ in network.unary]
        for (u, v), table in sorted(network.pairs.items()):
            costs, turned = np.ascontiguousarray(table), np.ascontiguousarray(table.T)
            to_u, to_v = np.zeros(len(costs)), np.zeros(len(turned))
            self.later[u].append(_Edge(v, costs, to_u, to_v))
            self.earlier[v].append(_Edge(u, turned, to_v, to_u))
        self.edges = [a + b for a, b in zip(self.earlier, self.later, strict=True)]
        ends = zip(self.earlier, self.later, strict=True)
        self.share = [1.0 / max(len(a), len(b), 1) for a, b in ends]

    def run(self, sweeps: int = SWEEPS) -> None:
        """Passes messages from the last variable to the first, then back, `sweeps` times."""
        # What is the same for all states of a message is left in it: it moves between variable and
        # pair, and no bound and no choice depends on where it is.
        forth = range(len(self.unary))
        for order, side in [(forth[::-1], self.earlier), (forth, self.later)] * sweeps:
            for v in order:
                if edges := side[v]:
                    mine = self.belief(v) * self.share[v]
                    for edge in edges:
                        np.minimum.reduce(edge.costs + (mine - edge.got)[:, None], out=edge.sent)

    def restricted(self, alive: Sequence[Table]) -> "Passing":
        """Returns a copy with only the states `alive[v]` of each variable v, and their messages."""
        smaller = Passing(self.network.restricted(alive))
        for v, edges in enumerate(smaller.edges):
            known = {edge.other: edge.got for edge in self.edges[v]}
            for edge in edges:
                edge.got[:] = known[edge.other][alive[v]]
        return smaller

    def shifted(self) -> Network:
        """Returns a network of equal total costs, with messages moved from pairs to variables."""
        network = Network()
        network.unary = [self.belief(v) for v in range(len(self.unary))]
        network.pairs = {
            (v, edge.other): edge.costs - edge.sent - edge.got[:, None]
            for v, edges in enumerate(self.later)
            for edge in edges
        }
        return network

    def belief(self, v: int) -> Table:
        """Returns the cost of each state of a variable, plus the messages sent to it."""
        total = self.unary[v].copy()
        for edge in self.edges[v]:
            total += edge.got
        return total

    def rounded(self) -> tuple[int, ...]:
        """Returns a cheap joint state: one by the messages, improved one variable at a time."""
        states: list[int] = []
        for v, costs in enumerate(self.unary):
            total = costs.copy()
            for edge in self.earlier[v]:
                total += edge.costs[:, states[edge.other]]
            for edge in self.later[v]:
                total += edge.got
            states.append(int(np.argmin(total)))
        doubtful = dict.fromkeys(range(len(states)))
        while doubtful:
            v, _ = doubtful.popitem()
            total = self.unary[v].copy()
            for edge in self.edges[v]:
                total += edge.costs[:, states[edge.other]]
            best = int(np.argmin(total))
            if total[best] < total[states[v]]:
                states[v] = best
                doubtful |= {edge.other: None for edge in self.edges[v]}
        return tuple(states)

    def bound(self) -> tuple[float, list[Table]]:
        """Returns a lower bound of all costs, and per variable by how much each state raises it."""
        lower, excess, kept = 0.0, [], []
        for v, later in enumerate(self.later):
            belief = self.belief(v)
            kept.append(belief * self.share[v])
            own = belief * (1.0 - self.share[v] * len(later))
            least = float(own.min())
            lower += least
            excess.append(own - least)
        for v, later in enumerate(self.later):
            for edge in later:
                table = edge.costs - edge.sent + (kept[v] - edge.got)[:, None]
                least = float(table.min())
                lower += least
                excess[v] += table.min(axis=1) - least
                excess[edge.other] += table.min(axis=0) - least
        return lower, excess


# The solver.

TABLE_LIMIT = 1 << 18  # entries of the largest table that elimination may build
ROUNDS = 12  # of message passing: states are dropped after each round of sweeps
CLOSE = 1e-9  # relative gap at which the two bounds are the same number


class Solution(NamedTuple):
    """A joint state: one state for each variable, its cost, and a lower bound of all costs."""

    states: tuple[int, ...]
    cost: float
    lower: float

    @property
    def exact(self) -> bool:
        """Whether it is proven that no joint state is cheaper."""
        return self.gap == 0.0

    @property
    def gap(self) -> float:
        """How far the cost is above the lower bound, as a share of the cost."""
        above = self.cost - self.lower
        return above / abs(self.cost) if above > CLOSE * abs(self.cost) else 0.0


def solve(
    network: Network,
    allowed: Sequence[Table] | None = None,
    known: Sequence[int] | None = None,
    close: float = CLOSE,
    limit: int = TABLE_LIMIT,
) -> Solution:
    """Returns the cheapest joint state of a network, or the best that was found.

    `allowed` has for each variable the states that it may be in; all of them if left out. A `known`
    joint state speeds this up, the more the cheaper it is, and is returned if nothing cheaper is
    found; what is cheaper by less than the share `close` is not looked for. No table gets more
    entries than the limit.
    """
    upper = math.inf if known is None else network.cost(known)
    found = Reduced(network, (), allowed, limit).solve({}, upper, close)
    return found if found.states or known is None else found._replace(states=tuple(known))


class Reduced:
    """A network made smaller once, to be solved often with the variables `kept` in given states."""

    # Every step keeps a cheapest joint state of what it is given, so the one found at the end is
    # one of the whole network. Trace, of a chain a - b - c in which a costs (0, 3), b and c (0, 0),
    # and neighbours that differ 5:
    #   eliminated  a answers b = 0 with 0, for 0, and b = 1 with 1, for 3, so b now costs (0, 3);
    #               b answers c likewise, so c now costs (0, 3); c = 0 is best;
    #   unwound     c = 0, to which b answered 0, to which a answered 0.
    # Variables with three neighbours or more are left by then: what answers them would be a table
    # of all joint states of their neighbours. Of these, `_cheaper` first drops states.

    def __init__(
        self,
        network: Network,
        kept: Collection[int] = (),
        allowed: Sequence[Table] | None = None,
        limit: int = TABLE_LIMIT,
    ) -> None:
        self._network, self._limit, self._is_asked_often = network, limit, bool(kept)
        self._alive = allowed or [np.arange(len(costs)) for costs in network.unary]
        restricted = network.restricted(self._alive) if allowed else network
        self._gone = Elimination(restricted)
        self._gone.run(limit, neighbours=2, keep=kept)
        if not kept and self._gone.fits(limit):
            whole = Elimination(restricted)
            if whole.run(limit):  # else factors of three variables are left, of which is no network
                self._gone = whole

    @cached_property
    def _passing(self) -> Passing:
        passing = Passing(self._gone.core())
        if self._is_asked_often:  # what was passed for all states helps where variables are pinned
            passing.run()
        return passing

    def solve(
        self,
        pins: Mapping[int, Sequence[int]],
        upper: float = math.inf,
        close: float = CLOSE,
        rounds: int = ROUNDS,
        scale: float = 0.0,
    ) -> Solution:
        """Returns the cheapest joint state in which each variable v of `pins` has one of pins[v].

        Only variables that were `kept` can be in `pins`. Solutions that cost no less than `upper`
        are not looked for, nor those that are cheaper than the best by less than the share `close`
        of `scale` (0: of the cost). If none is found, the solution has no states.
        """
        left, known, above = sorted(self._gone.left), {}, 0.0
        if left:
            allowed = [
                np.flatnonzero(np.isin(self._alive[v], pins[v]))
                if v in pins
                else np.arange(len(costs))
                for v, costs in zip(left, self._passing.unary, strict=True)
            ]
            passing = self._passing.restricted(allowed) if pins else self._passing
            constant = self._gone.constant
            # A bound costs as much as a sweep or two, and often settles what is pinned at once.
            sweeps = (0, 1, SWEEPS - 1) if self._is_asked_often else (SWEEPS,)
            core = _cheaper(passing, self._limit, rounds, upper - constant, close, scale, sweeps)
            if not core.states:
                return Solution((), upper, core.lower + constant)
            known = {v: int(a[s]) for v, a, s in zip(left, allowed, core.states, strict=True)}
            above = core.cost - core.lower
        found = self._gone.unwound(known)
        states = tuple(int(kept[s]) for kept, s in zip(self._alive, found, strict=True))
        cost = self._network.cost(states)
        return Solution(states, cost, cost - above)


def _cheaper(
    passing: Passing, limit: int, rounds: int, upper: float, close: float, scale: float,
    sweeps: Sequence[int],
) -> Solution:  # fmt: skip
    """Returns the cheapest joint state that is found below `upper`; one without states if none is.

    The messages in `passing` are the start. After each number of `sweeps` it looks whether they
    settle it; then it drops states that cannot be in a better one, and solves the smaller network.
    `limit` is as in `solve`, other arguments are as in `Reduced.solve`.
    """
    # `cost` is what some joint state costs, `lower` what none undercuts. A state whose own excess
    # over the lower bound is more than the gap between the two is in no better joint state: with
    # bounds 10 and 12, one with an excess of 3 makes everything cost 13 at least. Without such
    # states some variables have a single one, others fewer neighbours.
    for count in sweeps:
        passing.run(count)
        lower, excess = passing.bound()
        best = Solution((), upper, lower)
        if lower < upper and (cost := passing.network.cost(states := passing.rounded())) < upper:
            best = Solution(states, cost, min(lower, cost))
        scale = scale or abs(best.cost)
        if best.cost - best.lower <= close * scale:
            return best
    if rounds == 1:
        return best
    slack = best.cost - lower + CLOSE * scale
    kept = [np.flatnonzero(more <= slack) for more in excess]
    if not all(map(len, kept)):  # nothing is cheaper
        return best._replace(lower=best.cost)
    smaller = Reduced(passing.shifted().restricted(kept), limit=limit)
    found = smaller.solve({}, best.cost, close, rounds - 1, scale)
    best = best._replace(lower=max(best.lower, min(best.cost, found.lower)))
    if found.cost >= best.cost:
        return best
    states = tuple(int(k[s]) for k, s in zip(kept, found.states, strict=True))
    return Solution(states, found.cost, found.lower)
