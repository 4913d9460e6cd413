"""The cheapest moves that answer a question about a reshard; the question names no axes or dims.

Equal questions have equal answers, on whatever mesh, and are searched once: by A* over shardings. A
pair of shardings becomes a `Question` about *digits*: atoms, or runs of atoms that both shardings
have next to each other. What no cheapest path touches is left out of it:

- atoms that stay partial, and atoms that no step may use;
- dims that can be split no further;
- of the dims that neither end splits all but the roomiest. They are places to put atoms aside. One
  is kept, or two where something is partial or links differ;
- the atoms with which a dim begins at both ends, where all atoms are alike: they stay where they
  are. Where atoms differ they may have to make way for one of another size, or of a faster link.

Dims and digits come in an order that does not depend on their names. On larger meshes, where the
search is not exact anyway, common beginnings are always left out, and one spare dim stays, with
room for the atoms that neither end puts on a dim.

Example, on the mesh `data=4, model=2`, whose atoms are 0 and 1 (`data`) and 2 (`model`):
  from `[{data, model}, {}]` to `[{data}, {model}]`
  the first dim keeps 0 and 1; left is the question of one digit of size 2, atom 2, which leaves one
  dim for another: src `((0,), ())`, dst `((), (0,))`. A mesh `x=2` asks the same of `[{x}, {}]` and
  `[{}, {x}]`.
"""

import heapq
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, combinations, permutations
from typing import NamedTuple

from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, common_prefix
from spmd.mesh.topology import Topology
from spmd.reshard.comm import latency_steps, wire_bytes

EXACT_ATOMS = 4  # atoms are joined where there are more; with fewer the path is optimal
EXACT_DIGITS = 3  # of so many digits, joined ones among them, every legal step is tried as well

Dims = tuple[Axes, ...]


class Digit(NamedTuple):
    """An atom, or a run of atoms that move together, and its link: seconds a message, bytes/s."""

    sizes: tuple[int, ...]  # of its atoms
    latency: float  # seconds of one message over its link
    bandwidth: float  # bytes/s of its link
    flat: bool = False  # a collective takes two latencies, however many devices take part


class Question(NamedTuple):
    """A reshard in digits: from `src`, partial over `partial`, to `dst`; `room` limits pieces."""

    digits: tuple[Digit, ...]  # the other fields name them by their indices
    src: Dims
    dst: Dims
    partial: Axes  # digits that are partial at first, ascending
    room: tuple[int, ...]  # what each dim's size has in common with the number of devices


class Names(NamedTuple):
    """The atoms and dims that a question's digits and dims stand for; `kept`: atoms dims keep."""

    digits: tuple[Axes, ...]  # for each digit, its atoms
    dims: tuple[int, ...]  # for each dim, which one of the value's it is
    kept: Dims  # for each dim of the value, the atoms that it keeps throughout

    def atoms(self, digits: Axes) -> Axes:
        """Returns the atoms of some digits, in order."""
        if len(digits) == 1:
            return self.digits[digits[0]]
        return tuple(a for digit in digits for a in self.digits[digit])


class _Dim(NamedTuple):
    """Dim `number` of a value: its atoms before and after a reshard, less those that stay put."""

    number: int
    src: Axes
    dst: Axes
    room: int


def questions(
    src: Sharding, dst: Sharding, shape: Sequence[int], held: Axes, mesh: Mesh, topology: Topology
) -> Iterator[tuple[Question, Names]]:
    """Yields two `Question`s for one reshard: digits are runs of like atoms, then single atoms.

    `Names` says what the digits are. The first may have no path, if a dim has room just for a part
    of a digit. Both ends divide the sizes in `shape`; `src` is partial over all that `dst` is.
    """
    letters = atom_digits(mesh, topology)
    many, alike = len(letters) > EXACT_ATOMS, len(set(letters)) == 1
    dims, kept = [], []
    for number, (a, b, size) in enumerate(zip(src.dims, dst.dims, shape, strict=True)):
        kept.append(common_prefix(a, b) if many or alike else ())
        taken = len(kept[-1])
        dims.append(_Dim(number, a[taken:], b[taken:], size // mesh.extent(kept[-1])))
    aside = {a for axes in kept for a in axes}.union(dst.partial)
    aside.update([a for a in held if a not in src.used and a not in dst.used])
    atoms = [a for a in range(len(letters)) if a not in aside]
    partial = [a for a in src.partial if a not in aside]
    spares = 1 if many or (alike and not partial) else 2
    # Kept are dims that can be split, and of those that neither end splits only the roomiest.
    placed = {a for dim in dims for a in dim.src + dim.dst}
    parked = mesh.extent([a for a in atoms if a not in placed or not many])
    used = [d._replace(room=math.gcd(d.room, mesh.extent(atoms))) for d in dims if d.src or d.dst]
    spare = [d._replace(room=math.gcd(d.room, parked)) for d in dims if not (d.src or d.dst)]
    spare = sorted([d for d in spare if d.room > 1], key=lambda d: -d.room)
    dims = used + [
        dim
        for i, dim in enumerate(spare)
        if sum(other.room % dim.room == 0 for other in spare[:i]) < spares
    ]
    # What a dim or an atom looks like, not its number, says where it comes in a question.
    look = letters.__getitem__
    dims.sort(key=lambda d: (list(map(look, d.src)), list(map(look, d.dst)), d.room))
    met = [a for d in dims for a in d.src] + [a for d in dims for a in d.dst]
    order = dict.fromkeys(met + sorted(partial, key=look) + sorted(atoms, key=look))
    apart: list[Axes] = [(a,) for a in order]
    joined = apart
    if len(apart) > EXACT_ATOMS:
        joined = _joined(dims, partial, list(order), letters)
        joined = _refined(joined, [dim.room for dim in dims], mesh)
    for runs in (joined, apart):
        digit_of = {run[0]: i for i, run in enumerate(runs)}
        src_dims, dst_dims, (owed,) = (
            tuple([tuple([digit_of[a] for a in axes if a in digit_of]) for axes in side])
            for side in ([d.src for d in dims], [d.dst for d in dims], [partial])
        )
        question = Question(
            tuple([look(run[0])._replace(sizes=look(run[0]).sizes * len(run)) for run in runs]),
            src_dims,
            dst_dims,
            tuple(sorted(owed)),
            tuple([dim.room for dim in dims]),
        )
        yield question, Names(tuple(runs), tuple([dim.number for dim in dims]), tuple(kept))


@lru_cache(maxsize=64)
def atom_digits(mesh: Mesh, topology: Topology) -> tuple[Digit, ...]:
    """Returns every atom of a mesh as a digit, with the latency and the bandwidth of its link.

    A digit has one pace for all kinds of collectives, the median where kinds were measured one by
    one. With a pace for each, no bound would come near the cost of a path.
    """
    chip, usual = topology.chip, None
    if chip.measured:
        latency = statistics.median(m.latency for m in chip.measured)
        bandwidth = statistics.median(m.bandwidth for m in chip.measured)
        usual = Digit((), latency / 2, bandwidth, flat=True)
    return tuple(
        usual._replace(sizes=(size,))
        if usual and link == chip.ici
        else Digit((size,), link.latency, link.bandwidth)
        for size, link in zip(mesh.atom_sizes, topology.atom_links(mesh), strict=True)
    )


# Atoms that play the same part become one digit.


def _joined(
    dims: Sequence[_Dim], partial: Sequence[int], order: Sequence[int], letters: Sequence[Digit]
) -> list[Axes]:
    """Returns all atoms in runs that have equal links and stay together before and after."""
    # For each atom that splits a dim, the next one there; -1 for the last.
    ends = [
        {a: b for axes in side for a, b in zip(axes, (*axes, -1)[1:], strict=True)}
        for side in ([dim.src for dim in dims], [dim.dst for dim in dims])
    ]
    runs: list[Axes] = []
    for b in order:
        a = runs[-1][-1] if runs else b
        if (
            a != b
            and letters[a] == letters[b]
            and (a in partial) == (b in partial)
            and all(end[a] == b if a in end else b not in end for end in ends)
        ):
            runs[-1] = (*runs[-1], b)
        else:
            runs.append((b,))
    return runs


def _refined(runs: list[Axes], rooms: Sequence[int], mesh: Mesh) -> list[Axes]:
    """Returns runs of atoms, cut where another run or a dim has room for just a part of one.

    The longest run is cut first, into the longest part that fits and the rest, until there are
    `EXACT_DIGITS` runs or there is nothing to cut.
    """
    while len(runs) < EXACT_DIGITS:
        extents = [mesh.extent(run) for run in runs]
        fits = {*extents, *(math.gcd(whole, room) for whole in extents for room in rooms)}
        cuts = [
            (-extents[number], -keep, number)
            for number, run in enumerate(runs)
            for keep in range(1, len(run))
            if mesh.extent(run[:keep]) in fits
        ]
        if not cuts:
            break
        _, keep, number = min(cuts)
        run = runs[number]
        runs = [*runs[:number], run[:-keep], run[-keep:], *runs[number + 1 :]]
    return runs


# A question as a search problem: what a step costs, and what no path can undercut.

TICKS = 1e24  # of the clock in a second: a byte takes a whole number of them, but for 1e-11


class PathCost(NamedTuple):
    """What steps take: whole ticks (1e-24 s), bytes that each device sends, number of steps."""

    ticks: float  # whole, or infinity
    sent: int  # bytes that each device sends
    steps: int  # collectives and slices


class _Facts(NamedTuple):
    """How the digits of one dim differ from those that it has in the goal, `dst`."""

    extent: int  # into how many pieces it is split
    # The larger of its extent and the goal's: where neither is `apart`, one is a prefix of the
    # other, so these are the pieces of what a device holds and wants.
    common: int
    apart: bool  # whether the two differ before either ends
    losing: bool  # has to lose digits: its extent does not divide the goal's
    # For each class of slow links, the extent of digits over them that do not stay where they are,
    # of those that the goal uses elsewhere, and the largest whose two places are independent.
    crossings: tuple[tuple[int, int, int], ...]


class PricedQuestion:
    """A `Question` on a value of some bits: step costs, and lower bounds of the cost to `dst`."""

    def __init__(self, question: Question, bits: int = 0) -> None:
        self._bits = bits
        self._letters, self.src, self.dst, self.partial, self.room = question
        self.digits = tuple(range(len(self._letters)))
        # Of each digit, its size, and the ticks that a byte takes over its link.
        self.sizes = tuple(math.prod(letter.sizes) for letter in self._letters)
        self.paces = [round(TICKS / letter.bandwidth) for letter in self._letters]
        self._latencies = [round(letter.latency * TICKS) for letter in self._letters]
        self._best_pace = min(self.paces, default=0)
        self._best_latency = min(self._latencies, default=0)
        self._flat = any(letter.flat for letter in self._letters)
        # For each pace above the best one, from fast to slow: it, the least latency at it or a
        # slower one, and the digits of these links.
        self.slow: list[tuple[int, int, frozenset[int]]] = []
        for pace in sorted(set(self.paces) - {self._best_pace}):
            slow = frozenset(a for a in self.digits if self.paces[a] >= pace)
            self.slow.append((pace, min(self._latencies[a] for a in slow), slow))

        self.extent = cache(lambda axes: math.prod([self.sizes[a] for a in axes]))
        self.price = cache(self._price)
        self._facts = cache(self._facts_of)
        self.goal_places = places(self.dst, self.sizes)
        self.goal_extents = tuple(self.extent(axes) for axes in self.dst)
        self.goal_pieces = math.prod(self.goal_extents)
        # Into how many pieces the value must at least be split: the memory limit.
        self.fewest_pieces = min(self.goal_pieces, self.pieces(self.src))
        self._devices = self.extent(self.digits)
        # What a device holds if the value is reduced straight into the smallest tiles.
        tiles = min(math.prod(self.room) * self.extent(self.partial), self._devices)
        self._smallest_tile = bits // tiles

    def pieces(self, dims: Dims) -> int:
        """Returns the number of pieces of a value whose dims are split over these digits."""
        return math.prod(map(self.extent, dims))

    def divides(self, dim: int, axes: Axes) -> bool:
        """Returns whether a dim divides evenly over some digits."""
        return bool(self.room[dim] % self.extent(axes) == 0)

    def dividing(self, size: int, axes: Axes, pool: Iterable[int]) -> Axes:
        """Returns digits of `pool`, in order, that together divide what `axes` leave of `size`."""
        extent, run = self.extent(axes), []
        for a in pool:
            if size % (extent * self.sizes[a]) == 0:
                extent *= self.sizes[a]
                run.append(a)
        return tuple(run)

    def _price(self, kind: str, axes: Axes, pieces: int) -> PathCost:
        """Returns the cost of a step over the digits `axes` on a value in so many pieces before."""
        if kind == "slice":
            return PathCost(0, 0, 1)
        group = self.extent(axes)
        before, after = (
            -(-self._bits // (8 * count)) for count in (pieces, pieces_after(kind, group, pieces))
        )
        sent = wire_bytes(kind, group, before, after)
        letters = [self._letters[a] for a in axes]
        steps = 2
        if not all([letter.flat for letter in letters]):
            steps = latency_steps(kind, [n for letter in letters for n in letter.sizes])
        latency = max([self._latencies[a] for a in axes]) * steps
        return PathCost(latency + sent * max([self.paces[a] for a in axes]), sent, 1)

    def bound(self, dims: Dims, partial: Axes) -> PathCost:
        """Returns a lower bound of the cost from a sharding to `dst`.

        Bytes: a device must receive what its final tile has beyond its present one; what is partial
        must be reduced, at best into the smallest tiles. Collectives: every dim that has to lose
        digits takes one; so do all dims together that differ from their goal without having to lose
        any, and so does a reduction. Rounds: in each of them pieces at most double.
        """
        # [{a}, {}] -> [{}, {a}]: a device holds a row, wants a column, and the first dim has to
        # lose a digit: one collective. The second is a prefix of its goal, and asks for none.
        facts = list(map(self._facts, range(len(dims)), dims))
        losing = sum(fact.losing for fact in facts)
        clash = any([fact.apart and not fact.losing for fact in facts])
        ways, wanted = self.extent(partial), self._bits // self.goal_pieces
        if partial:
            wanted += self._smallest_tile * (ways - 2)
        elif not any([fact.apart for fact in facts]):
            wanted -= -(-self._bits // math.prod([fact.common for fact in facts]))
        sent = max(wanted, 0) // 8
        launches = max(losing + clash + bool(partial), int(sent > 0))
        if not launches:
            return PathCost(0, 0, 0)
        owed = [self._letters[a] for a in partial if not self._letters[a].flat]
        rounds = sum(sum(letter.sizes) - len(letter.sizes) for letter in owed)
        if not self._flat:  # in each round of a gather pieces double
            pieces = math.prod([fact.extent for fact in facts])
            mantissa, exponent = math.frexp(pieces * ways / self.goal_pieces)
            rounds += max(exponent - (mantissa == 0.5), 0)
        ticks = self._best_latency * (launches + max(launches, rounds)) + self._best_pace * sent
        # What slow links add, at least, to the time over the fastest ones: the devices with equal
        # coordinates along the digits that cross hold some of the elements that they need; the
        # others have to come in over slow links, in equal shares.
        added = 0
        for number, (pace, latency, slow) in enumerate(self.slow):
            crossings = [fact.crossings[number] for fact in facts]
            extent = math.prod([crossing[0] for crossing in crossings])
            terms = self.extent(tuple([a for a in partial if a in slow]))
            if extent == terms == 1:
                continue
            kept = math.prod([crossing[1] for crossing in crossings])
            luck = max([crossing[2] for crossing in crossings], default=1)  # a scalar has none
            beyond = self._bits * (extent * luck - kept) // (self._devices * kept * luck)
            slowly = max(beyond, self._bits * (terms - 1) // self._devices, 0) // 8
            more = 2 * (latency - self._best_latency) + (pace - self._best_pace) * slowly
            added = max(added, more)
        return PathCost(ticks + added, sent, launches)

    def _facts_of(self, dim: int, axes: Axes) -> _Facts:
        goal, wanted, extent = self.dst[dim], self.goal_extents[dim], self.extent(axes)
        shorter = min(len(axes), len(goal))
        crossings = []
        for *_, slow in self.slow:
            crossing = kept = luck = 1
            for a, (_, above) in places((axes,), self.sizes).items():
                aim, size = self.goal_places.get(a), self.sizes[a]
                if a not in slow or aim == (dim, above):
                    continue
                crossing *= size
                if aim is not None:
                    kept *= size
                    minor, major = max(above, aim[1]), min(above, aim[1])
                    if aim[0] != dim or minor % (major * size) == 0:
                        luck = max(luck, size)
            crossings.append((crossing, kept, luck))
        differs, losing = axes[:shorter] != goal[:shorter], wanted % extent != 0
        return _Facts(extent, max(extent, wanted), differs, losing, tuple(crossings))


def pieces_after(kind: str, group: int, pieces: int) -> int:
    """Returns into how many pieces a value is split after a step among `group` devices."""
    if kind in ("slice", "reduce_scatter"):
        return pieces * group
    return pieces // group if kind == "all_gather" else pieces


def moved(before: Dims, after: Dims, sizes: tuple[int, ...]) -> Axes:
    """Returns the atoms that split another dim (or level of it) after than before, ascending."""
    first, second = places(before, sizes), places(after, sizes)
    return tuple(sorted(a for a in first | second if first.get(a) != second.get(a)))


@lru_cache(maxsize=1 << 14)
def places(dims: Dims, sizes: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """Returns atom -> (the dim that it splits, number of pieces by more major atoms there)."""
    found = {}
    for dim, axes in enumerate(dims):
        extent = 1
        for a in axes:
            found[a] = (dim, extent)
            extent *= sizes[a]
    return found


# The steps that a search tries out of a sharding: every legal one, or those towards the goal.


class AtomMove(NamedTuple):
    """A step over digits `axes`, which changes the dims `at`, to the sharding `dims`, `partial`."""

    kind: str
    dims: Dims
    partial: Axes
    axes: Axes
    at: tuple[int, ...]


def step(kind: str, dims: Dims, partial: Axes, run: Axes, changed: Mapping[int, Axes]) -> AtomMove:
    """Returns the step over the digits (atoms) of `run`; `changed`: dim -> its digits afterwards.

    It is a slice or a reduce-scatter if one dim gets them at its minor end, an all-gather if one
    loses them there, an all-to-all if they go from one to another; an all-reduce changes no dim.
    """
    after = tuple([changed.get(d, axes) for d, axes in enumerate(dims)])
    return AtomMove(kind, after, without(partial, run), run, tuple(changed))


class Moves:
    """Makes every legal step out of a sharding in digits (atoms or runs); a subclass fewer."""

    def __init__(self, problem: PricedQuestion) -> None:
        self.problem = problem
        self._layouts = cache(lambda *look: list(self._fill(*look)))

    @staticmethod
    def among(sizes: Iterable[Iterable[int]], rank: int, room: int) -> "Moves":
        """Makes the steps of digits of atoms of these `sizes`, whatever the goal and the costs."""
        digits, whole = tuple(Digit(tuple(own), 0.0, 1.0) for own in sizes), ((),) * rank
        return Moves(PricedQuestion(Question(digits, whole, whole, (), (room,) * rank)))

    def out_of(self, dims: Dims, partial: Axes, pieces: int) -> Iterator[AtomMove]:
        """Yields the steps that may come after a sharding that splits the value into `pieces`."""
        # Of paths that cost the same, the order of these decides.
        if idle := without(self.problem.digits, {*chain(*dims), *partial}):
            yield from self._appends("slice", dims, partial, idle)
        # A gather may not leave a larger piece than the larger end has: the memory limit.
        room = pieces // self.problem.fewest_pieces
        for dim, axes in enumerate(dims) if room > 1 else ():
            for keep in self._gathered(dims, dim, room):
                if self.problem.extent(axes[keep:]) <= room:
                    yield step("all_gather", dims, partial, axes[keep:], {dim: axes[:keep]})
        for dim, axes in enumerate(dims):
            for other in range(len(dims)) if axes else ():
                for keep in self._exchanged(dims, dim, other) if other != dim else ():
                    longer = dims[other] + axes[keep:]
                    if self.problem.divides(other, longer):
                        changed = {dim: axes[:keep], other: longer}
                        yield step("all_to_all", dims, partial, axes[keep:], changed)
        if partial:
            for run in self._reduced(partial):
                yield step("all_reduce", dims, partial, run, {})
            yield from self._appends("reduce_scatter", dims, partial, partial)
        for after in self.arrangements(dims, partial):
            if after != dims:
                run = moved(dims, after, self.problem.sizes)
                yield AtomMove("collective_permute", after, partial, run, ())

    def _appends(self, kind: str, dims: Dims, partial: Axes, pool: Axes) -> Iterator[AtomMove]:
        for dim, axes in enumerate(dims):
            for run in self._runs(dims, dim, pool):
                if self.problem.divides(dim, axes + run):
                    yield step(kind, dims, partial, run, {dim: axes + run})

    def _runs(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        # Runs of digits out of `pool` that a step may append to a dim if they divide it.
        return chain(*[permutations(pool, count) for count in range(1, len(pool) + 1)])

    def _gathered(self, dims: Dims, dim: int, room: int) -> Iterable[int]:
        # How many major digits an all-gather may keep; pieces may grow `room` times.
        return range(len(dims[dim]))

    def _exchanged(self, dims: Dims, dim: int, other: int) -> Iterable[int]:
        # How many major digits of a dim may stay when the rest goes to dim `other`.
        return range(len(dims[dim]))

    def _reduced(self, owed: Axes) -> Iterable[Axes]:
        # The sets of partial digits that one all-reduce may reduce.
        return chain(*[combinations(owed, count) for count in range(len(owed), 0, -1)])

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """Returns the dims that a collective-permute may lead to, in as many pieces each as now."""
        extents = tuple([self.problem.extent(axes) for axes in dims])
        return self._layouts(extents, without(self.problem.digits, partial))

    def _fill(self, extents: tuple[int, ...], pool: Axes) -> Iterator[Dims]:
        # Dims of these extents that are split by digits out of `pool`, in any order.
        if not extents:
            yield ()
        elif extents[0] == 1:
            for rest in self._fill(extents[1:], pool):
                yield ((), *rest)
        else:
            for a in pool:
                left, over = divmod(extents[0], self.problem.sizes[a])
                others = without(pool, (a,))
                for found in () if over else self._fill((left, *extents[1:]), others):
                    yield ((a, *found[0]), *found[1:])


class DirectedMoves(Moves):
    """Makes just the steps that lead towards the goal, which is a question's `dst`.

    - A slice or a reduce-scatter appends the digits that the goal has next in this dim; or those
      that it has next in another dim, to go there together with the ones that are here; or, in
      place of them, any digits: as many as the goal's local shape asks for, and as many as fit.
    - A gather or an all-to-all takes the digits behind the prefix in common with the goal, or those
      beyond the goal's local shape. An all-to-all also takes what the other dim's goal has next.
    - A permute leads to the longest prefixes of the goal that the local shape allows, the rest
      filled with digits that then go to the dim that misses them, or that are gathered.
    """

    def _runs(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        problem, axes = self.problem, dims[dim]
        found = [continuation(axes, problem.dst[dim], pool)]
        for other, goal in enumerate(problem.dst):
            if other != dim and goal[: len(dims[other])] == dims[other]:
                found += [
                    continuation(dims[other] + axes[k:], goal, pool) for k in range(len(axes))
                ]
        stand_ins = sorted(pool, key=lambda a: (a in problem.goal_places, a))
        # All of the digits, and those of each size.
        sizes = sorted({problem.sizes[a] for a in pool})
        groups = [[a for a in stand_ins if problem.sizes[a] == size] for size in sizes]
        for alike in (stand_ins, *groups):
            for size in (problem.goal_extents[dim], problem.room[dim]):
                found.append(problem.dividing(size, axes, alike))
        return filter(None, dict.fromkeys(found))

    def _gathered(self, dims: Dims, dim: int, room: int) -> Iterable[int]:
        axes, paces, extent = dims[dim], self.problem.paces, self.problem.extent
        keeps = self._beyond_goal(axes, dim)
        keeps.update([k for k in range(len(axes)) if extent(axes[k:]) <= room][:1])
        keeps.update(k for k in range(1, len(axes)) if paces[axes[k - 1]] != paces[axes[k]])
        return sorted(keeps)

    def _exchanged(self, dims: Dims, dim: int, other: int) -> Iterable[int]:
        axes, target, goal = dims[dim], dims[other], self.problem.dst[other]
        keeps = self._beyond_goal(axes, dim)
        extent, wanted = self.problem.extent, self.problem.goal_extents[other]
        space = wanted // extent(target) if wanted % extent(target) == 0 else 1
        for keep in range(len(axes)):
            joined = target + axes[keep:]
            if extent(axes[keep:]) == space or goal[: len(joined)] == joined:
                keeps.add(keep)
        return sorted(keeps)

    def _beyond_goal(self, axes: Axes, dim: int) -> set[int]:
        """Returns counts of major digits to keep: as in common with the goal, or of its extent."""
        wanted, extent = self.problem.goal_extents[dim], self.problem.extent
        common = len(common_prefix(axes, self.problem.dst[dim]))
        return {k for k in range(len(axes)) if k == common or extent(axes[:k]) == wanted}

    def _reduced(self, owed: Axes) -> Iterable[Axes]:
        return (owed,)

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """Returns the dims that a collective-permute may lead to: they begin as in the goal.

        What is left is filled with digits that are there now, or that the goal has nowhere, if
        possible: from the first dim to the last, or from the last to the first.
        """
        # With digits of size 2, from [{a, b}, {c}] to [{c}, {a, b}]: dim 0 keeps its four pieces, c
        # and one more digit; dim 1 takes a. So b waits in dim 0, and an all-to-all is left.
        problem, sizes = self.problem, self.problem.sizes
        prefixes: list[Axes] = []
        spaces: list[int] = []  # the extent that each dim's prefix leaves to be filled
        for axes, goal in zip(dims, problem.dst, strict=True):
            space, prefix = problem.extent(axes), continuation((), goal, without(goal, partial))
            count = 0
            while count < len(prefix) and space % sizes[prefix[count]] == 0:
                space //= sizes[prefix[count]]
                count += 1
            prefixes.append(prefix[:count])
            spaces.append(space)
        found: dict[Dims, None] = {}
        for order in (range(len(dims)), range(len(dims))[::-1]):
            after, pool = list(prefixes), set(problem.digits).difference(partial, *prefixes)
            for dim in order:
                spare = sorted(
                    pool, key=lambda a: (a not in dims[dim], a in problem.goal_places, a)
                )
                run = problem.dividing(spaces[dim], (), spare)
                after[dim] += run
                pool.difference_update(run)
            if list(map(problem.extent, after)) == list(map(problem.extent, dims)):
                found[tuple(after)] = None
        return found


def without(axes: Axes, gone: Iterable[int]) -> Axes:
    """Returns `axes` without the digits that are `gone`."""
    return tuple([a for a in axes if a not in gone])


def continuation(axes: Axes, goal: Axes, pool: Axes) -> Axes:
    """Returns digits of `goal` behind its prefix `axes`, while in `pool`; () if it is no prefix."""
    start = end = len(axes)
    if goal[:start] != axes:
        return ()
    while end < len(goal) and goal[end] in pool:
        end += 1
    return goal[start:end]


# The search.

# The weights of the lower bound with which a directed search goes over shardings, one after
# another, and how many of them it expands at most: the first one finds some path, soon.
PHASES = ((100, None), (20, 300), (5, 300), (2, 300), (1.2, 100))
Answer = tuple[AtomMove, ...]  # moves from first to last


def is_small(question: Question) -> bool:
    """Whether a question has so few digits that every legal step can be tried."""
    is_joined = any(len(digit.sizes) > 1 for digit in question.digits)
    return len(question.digits) <= (EXACT_DIGITS if is_joined else EXACT_ATOMS)


@lru_cache(maxsize=1 << 14)
def cheapest(question: Question, bits: int) -> Answer | None:
    """Returns the moves that answer a `Question` on a value of so many bits; None if none do.

    No moves are cheaper if the question is small: every legal step is tried. Else only steps that
    lead towards the goal are, greedily first; then it is looked for what is cheaper.
    """
    problem, is_exact = PricedQuestion(question, bits), is_small(question)
    best, limit = None, PathCost(math.inf, 0, 0)
    search = _PathSearch(problem, Moves(problem) if is_exact else DirectedMoves(problem))
    for greed, budget in ((1, None),) if is_exact else PHASES:
        if (found := search.shortest(limit, greed, budget)) is not None:
            best, limit = found
    return best


Node = tuple[Dims, Axes]  # a sharding that a search has met: dims, and what is partial


class _PathSearch:
    def __init__(self, problem: PricedQuestion, moves: Moves) -> None:
        self.problem, self._moves = problem, moves
        self._bound = cache(problem.bound)
        self._edges = cache(self._edges_of)

    def _edges_of(self, dims: Dims, partial: Axes) -> list[tuple[PathCost, AtomMove]]:
        pieces = self.problem.pieces(dims)
        moves = self._moves.out_of(dims, partial, pieces)
        return [(self.problem.price(move.kind, move.axes, pieces), move) for move in moves]

    def shortest(
        self, limit: PathCost, greed: float, budget: int | None
    ) -> tuple[Answer, PathCost] | None:
        """Returns the best path by A*, and its cost; None if none costs less than the limit.

        At most `budget` shardings are expanded. With more `greed`, the weight of the lower bound,
        than 1 the search is faster, and no longer optimal.
        """
        # A sharding's estimate is what the way to it cost, plus what no way on from it undercuts.
        # The cheapest estimate is expanded first, so when that is the goal no other way is cheaper
        # (but for the greed). A sharding may be met again on a cheaper way: then the entry that it
        # already has in the heap is out of date, and is skipped.
        #
        # Trace, in bytes sent, of 16 bytes from [{x}, {y}] to [{}, {x}] on a 2 x 2 mesh:
        #   gather y:            4 to [{x}, {}],    4 more at least, estimate 8
        #   move x behind y:     2 to [{}, {y, x}], 8 more at least, estimate 10
        #   gather x:            4 to [{}, {y}],    8 more at least, estimate 12
        # The first is expanded: an all-to-all leads on to the goal, for 8 in all. That is the
        # cheapest estimate there is, so the other two are never looked at again.
        start: Node = self.problem.src, self.problem.partial
        best: dict[Node, PathCost] = {start: PathCost(0, 0, 0)}
        came: dict[Node, tuple[Node, AtomMove]] = {}
        heap = [((0.0, 0, 0), (0, 0), best[start], start)]
        expanded = 0
        while heap and (budget is None or expanded < budget):
            _, _, spent, here = heapq.heappop(heap)
            if here == (self.problem.dst, ()):
                path: list[AtomMove] = []
                while here in came:
                    here, move = came[here]
                    path.append(move)
                return tuple(path[::-1]), spent
            if best[here] < spent:
                continue
            expanded += 1
            time, sent, count = spent
            permuted = here in came and came[here][1].kind == "collective_permute"
            for number, (more, move) in enumerate(self._edges(*here)):
                if permuted and move.kind == "collective_permute":
                    continue  # two that follow one another are one
                cost = PathCost(time + more[0], sent + more[1], count + 1)
                there = move.dims, move.partial
                if cost >= limit or (there in best and best[there] <= cost):
                    continue
                left = self._bound(*there)
                estimate = (cost[0] + greed * left[0], cost[1] + left[1], cost[2] + left[2])
                if estimate >= limit:
                    continue
                best[there], came[there] = cost, (here, move)
                turn = (-expanded, number)  # of equals the one found last, nearer to the goal
                heapq.heappush(heap, (estimate, turn, cost, there))
        return None
