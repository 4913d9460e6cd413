"""`Search`: of all programs that are tried, the fastest that fits in memory.

All that the compiler tries is compared here, by the predicted seconds of one run and the bytes of
one device: plans, prices of memory, forms of a program, schedules of pipelines, meshes.
"""

import math
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from spmd.errors import PlanError
from spmd.planning.plan import Weighed

TOO_LARGE = "it does not fit in memory"


class Judged(Protocol):
    """A program of one device that was tried, with its predicted time and memory."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of one run."""

    @property
    def bytes(self) -> int:
        """Predicted bytes of memory of one device, at the peak."""


T = TypeVar("T", bound=Judged)


class Candidate(NamedTuple, Generic[T]):
    """A variant of a program; made only if the most seconds it can save (`hope`) reach `price`."""

    name: str  # what is pinned, for people
    make: Callable[[], T] | None  # may raise `PlanError`; None: there is no memory for it
    # Seconds of a run that it has to win, for what predictions leave out: time to compile it, more
    # kernels.
    price: float = 0.0
    hope: float = math.inf  # the most seconds that it can win


class Search(Generic[T]):
    """Collects programs that were tried; the best is the fastest that fits, else the smallest."""

    def __init__(self, limit: float, tried: Iterable[T] = ()) -> None:
        self.limit = limit  # bytes that one device may use
        # Each try: the program (None: not made), its price, and what to say of a `Candidate`.
        self._entries: list[tuple[T | None, float, Weighed | None]] = []
        for trial in tried:
            self.add(trial)

    @property
    def tried(self) -> list[T]:
        """Every program that was made, in the order of the tries."""
        return [trial for trial, _, _ in self._entries if trial is not None]

    @property
    def best(self) -> T:
        """The program that fits with the least seconds plus price; the smallest if none fits."""
        best = self._best()
        assert best is not None
        return best

    @property
    def seconds(self) -> float:
        """Predicted seconds of the best program if it fits, else infinity."""
        best = self._best()
        return best.seconds if best is not None and self.fits(best) else math.inf

    def fits(self, trial: T) -> bool:
        """Returns whether a program needs at most the `limit` of the search, in bytes."""
        return trial.bytes <= self.limit

    def add(self, trial: T) -> T:
        """Adds a program that was tried, without a price, and returns it."""
        self._entries.append((trial, 0.0, None))
        return trial

    def weigh(self, candidate: Candidate[T]) -> T | None:
        """Tries a candidate; returns its program, or None if it can't save its price or be made."""
        name, make, price, hope = candidate
        best, made, refusal = self._best(), None, ""
        before = math.inf if best is None else best.seconds
        if hope < price:
            refusal = _too_slow(price)
        elif make is None:
            refusal = TOO_LARGE
        else:
            try:
                made = make()
            except PlanError as error:
                refusal = error.what
        said = Weighed(name, None if made is None else made.seconds, before, refusal)
        self._entries.append((made, price, said))
        return made

    @property
    def weighed(self) -> tuple[Weighed, ...]:
        """For each candidate, in order, its predicted seconds and why it was not taken."""
        best, found = self._best(), []
        for trial, price, said in self._entries:
            if said is None:
                continue
            if trial is not None and trial is not best:
                refusal = "another one is faster"
                if not self.fits(trial):
                    refusal = TOO_LARGE
                elif 0 < said.before - trial.seconds < price:
                    refusal = _too_slow(price)
                said = said._replace(refusal=refusal)
            found.append(said)
        return tuple(found)

    def _best(self) -> T | None:
        made = [(t.seconds + price, t) for t, price, _ in self._entries if t is not None]
        # Memory takes a look at the whole program: only of what is faster than all that fit.
        by_time = [trial for _, trial in sorted(made, key=lambda pair: pair[0])]
        fitting = (trial for trial in by_time if self.fits(trial))
        return next(fitting, None) or min(by_time, key=lambda trial: trial.bytes, default=None)


def _too_slow(price: float) -> str:
    return f"it would have to win {price * 1e3:.3g} ms"
