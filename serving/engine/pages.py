"""Who uses which page of a pool, and which pages hold tokens that another prompt may begin with.

A page is *free*, *held* by one or more sequences, or *cached*: nobody holds it, but its tokens are
known, and a prompt that begins with them takes it instead of running them again. Often that is the
same system prompt, or the same conversation one turn later. Cached pages are given away when no
page is free, those first that were used the longest ago.

A full page can be *entered*, with its tokens, behind the page of the tokens before it. What is
entered makes a radix tree (Zheng et al., *SGLang: Efficient Execution of Structured Language Model
Programs*, 2024) whose edges are pages. Pages of two tokens, after "a b c d e" and "a b x y":

    (ROOT, "a b") -> page 3      (3, "c d") -> page 7      (3, "x y") -> page 1
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = -1
"""Stands for the page before a sequence's first one."""


class Pages:
    """The pages of one pool, numbered from 0.

    Args:
      count: how many there are.
    """

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
            self._forget_one()
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

    def _forget_one(self) -> None:
        page, _ = self._cached.popitem(last=False)
        del self._found[self._places.pop(page)]
        self._free.append(page)
