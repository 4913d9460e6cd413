"""Requests that are not over, and the groups of slots and pages in which they run.

Pages also remember what they hold: another prompt may begin with the same tokens.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from spmd.serving.engine.actions import Job
from spmd.serving.engine.backend import Limits, Words
from spmd.serving.engine.drafts import Agreement, Said

ROOT = -1
"""Stands for the page before a sequence's first one."""


class Pages:
    """The pages of one pool, numbered from 0."""

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = list(range(count))[::-1]
        # The least recently used first. Whoever holds a page holds those before it, and a sequence
        # gives its last page back first: so the first one here is always a leaf of the tree.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._found: dict[tuple[int, bytes], int] = {}
        self._places: dict[int, tuple[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def held(self) -> int:
        """How many pages are held."""
        return len(self) - self.available

    @property
    def cached(self) -> int:
        """How many pages nobody holds, but whose tokens are known."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """How many pages can be allocated: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Takes pages of any content; cached ones are forgotten if there are not enough free ones.

        Raises:
          ValueError: `count` is more than `available`.
        """
        if count > self.available:
            raise ValueError(f"{count} pages are wanted, {self.available} can be had")
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            del self._found[self._places.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The pages that hold the longest beginning of a sequence; nobody holds them for that yet.

        Args:
          keys: what stands for the tokens of each page.
        """
        pages, before = [], ROOT
        for key in keys:
            page = self._found.get((before, key))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages

    def cost(self, matched: Sequence[int]) -> int:
        """By how many fewer pages are available once these are held."""
        return sum(not self._holders[page] for page in matched)

    def share(self, matched: Sequence[int]) -> None:
        """Holds the pages that `match` found, beside those who may hold them already."""
        for page in matched:
            self._holders[page] += 1
            self._cached.pop(page, None)

    def enter(self, page: int, before: int, key: bytes) -> int:
        """Makes a full page known, that is not written any more.

        Args:
          page: a page that one sequence holds.
          before: the entered page with the tokens before, or `ROOT`; the sequence holds it too.
          key: what stands for its tokens.

        Returns:
          The page that is known to have these tokens there: `page`, unless another one was entered
          earlier. Then `page` stays unknown.
        """
        place = (before, key)
        known = self._found.setdefault(place, page)
        if known == page:
            self._places[page] = place
        return known

    def release(self, pages: Sequence[int]) -> None:
        """Gives back pages of a sequence, in its order; entered ones stay until they are needed."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._places:
                self._cached[page] = None
            else:
                self._free.append(page)


@dataclasses.dataclass(eq=False, slots=True)
class Ongoing:
    """A request that is not over, and how far it has come."""

    job: Job  # what is asked for
    tokens: array[int]  # its prompt and the drawn tokens that are known
    wanted: int  # tokens to draw in calls that have not begun
    order: int = -1  # as what number it got its first slot; the *oldest* request has the lowest
    slot: int = -1  # over all groups; -1 while it waits
    pages: tuple[int, ...] = ()  # of the slot, within the group
    room: int = 0  # positions of these pages
    # so many tokens are run as chunks; the calls behind them each run the latest drawn one
    end: int = 0
    filled: int = 0  # positions whose calls have begun, or that pages held already
    paid: int = 0  # positions that had been filled when it lost its slot
    entered: int = 0  # how many of the pages are known by their tokens
    mask: Words | None = None  # the tokens that may be drawn next; None are all
    said: Said = dataclasses.field(default_factory=Said)  # where its tokens stood earlier
    quoting: Agreement = dataclasses.field(default_factory=Agreement)  # with what was said there
    agreement: Agreement = dataclasses.field(default_factory=Agreement)  # with a draft model
    # those of the job
    key: int = dataclasses.field(init=False)
    client: str = dataclasses.field(init=False)
    user: str = dataclasses.field(init=False)
    priority: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.key, self.priority = self.job.key, self.job.priority
        self.client, self.user = self.job.client, self.job.user

    @property
    def scores(self) -> bool:
        """Whether chunks that begin now have to give scores."""
        return self.job.score_prompt and len(self.tokens) == len(self.job.prompt)


class Group:
    """The slots and pages of one group, and who has them.

    Attributes:
      pages: its pool.
      running: the requests that have a slot.
      filling: the one of them whose chunks have not all begun. There is one at most: the next one
        gets its slot after that.
    """

    def __init__(self, limits: Limits, index: int) -> None:
        self.pages = Pages(limits.pages)
        self.running: set[Ongoing] = set()
        self.filling: Ongoing | None = None
        self._page = limits.page
        count = limits.slots // limits.groups
        self._free = list(range(index * count, (index + 1) * count))[::-1]

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    @property
    def youngest(self) -> Ongoing:
        """The running request that got its slot last."""
        return max(self.running, key=lambda request: request.order)

    def find(self, request: Ongoing) -> list[int] | None:
        """The pages that hold a request's beginning; None if it cannot run here now.

        It can if there is a slot, and if beside its own pages there is one for each request that
        runs: else those would soon have to take its pages away again.
        """
        if not self._free:
            return None
        # The last token is always run, as the next one is drawn behind it. Scores come from running
        # all of them.
        most = 0 if request.scores else (len(request.tokens) - 1) // self._page
        matched = self.pages.match(self._keys(request, 0, most))
        own = -(-len(request.tokens) // self._page) - len(matched)
        taken = own + self.pages.cost(matched) + len(self.running)
        return matched if taken <= self.pages.available else None

    def place(self, request: Ongoing, matched: list[int]) -> None:
        """Gives a request a slot, the pages that `find` returned, and all others that it needs."""
        self.pages.share(matched)
        count = -(-len(request.tokens) // self._page)
        request.pages = (*matched, *self.pages.allocate(count - len(matched)))
        request.room = count * self._page
        request.slot = self._free.pop()
        request.end = len(request.tokens)
        request.entered = len(matched)
        request.filled = len(matched) * self._page
        self.running.add(request)

    def grow(self, request: Ongoing) -> None:
        """Gives a request one more page."""
        self.enter(request, replace=True)
        request.pages = (*request.pages, *self.pages.allocate(1))
        request.room += self._page

    def enter(self, request: Ongoing, *, replace: bool) -> None:
        """Makes a request's pages known that are full once all calls that have begun are done.

        Args:
          replace: whether, if another page is known to have the same tokens, the request holds that
            one from now on and gives back its own. Not while a step is made that writes its own.
        """
        full = min(request.filled, len(request.tokens)) // self._page
        for i, key in enumerate(self._keys(request, request.entered, full), request.entered):
            page, before = request.pages[i], request.pages[i - 1] if i else ROOT
            known = self.pages.enter(page, before, key)
            if known != page:
                if not replace:
                    break
                self.pages.share([known])
                self.pages.release([page])
                request.pages = (*request.pages[:i], known, *request.pages[i + 1 :])
            request.entered += 1

    def remove(self, request: Ongoing) -> None:
        """Takes slot and pages from a request; calls under way may go on writing there.

        That does no harm. Whoever gets a page writes it in a later call, and what such a call
        writes to a page that stays known is what it is known to hold.
        """
        self.enter(request, replace=True)
        self.pages.release(request.pages)
        self._free.append(request.slot)
        self.running.remove(request)
        if self.filling is request:
            self.filling = None
        request.slot, request.pages, request.room = -1, (), 0

    def _keys(self, request: Ongoing, start: int, end: int) -> Iterator[bytes]:
        """What stands for the tokens of the pages from `start` to `end`, and for the job's salt."""
        size, salt = self._page, request.job.salt.encode()
        for i in range(start, end):
            tokens = request.tokens[i * size : (i + 1) * size].tobytes()
            yield tokens if i else salt + tokens  # all others are found behind the first one
