"""Pages of a pool: by rules of hypothesis against a plain model, and by hand."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spmd.serving.engine.groups import ROOT, Pages

COUNT = 12


class Held:
    """A sequence: its keys, one for each page, its pages, and how many of them are full."""

    def __init__(self, keys: tuple[bytes, ...], pages: list[int], shared: int) -> None:
        self.keys, self.pages = keys, pages
        self.shared = shared  # found, so never written by this sequence
        self.entered = shared


class Machine(RuleBasedStateMachine):
    """Sequences take pages, fill and enter them one by one, and give them back.

    `content` is what the pages really hold: all keys from the sequence's beginning to the page's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(COUNT)
        self.sequences: list[Held] = []
        self.content: dict[int, tuple[bytes, ...]] = {}
        self.clock = 0
        self.used: dict[int, int] = {}

    @rule(keys=st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=6), more=st.booleans())
    def take(self, keys: list[bytes], more: bool) -> None:
        found = self.pages.match(keys)
        # What is found holds exactly these tokens, behind exactly those before.
        for i, page in enumerate(found):
            assert self.content[page] == tuple(keys[: i + 1])
        count = len(keys) + more - len(found)
        available = self.pages.available
        if count + self.pages.cost(found) > available:
            return
        self.pages.share(found)
        assert self.pages.available == available - len(
            [page for page in found if not self.holders(page)]
        )
        own = self.allocate(count)
        self.sequences.append(Held(tuple(keys), found + own, len(found)))

    def allocate(self, count: int) -> list[int]:
        free, before = len(self.pages._free), set(self.pages._cached)
        own = self.pages.allocate(count)
        assert len(set(own)) == count
        gone = before - set(self.pages._cached)
        assert len(gone) == max(0, count - free)  # nothing is forgotten without need
        assert not any(self.holders(page) for page in (*own, *gone))
        if gone and self.pages._cached:  # the least recently used ones
            assert max(self.used[page] for page in gone) <= min(
                self.used[page] for page in self.pages._cached
            )
        for page in own:
            self.content.pop(page, None)
        return own

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def grow(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if self.pages.available:
            sequence.pages += self.allocate(1)
        else:
            with pytest.raises(ValueError, match="1 pages are wanted, 0 can be had"):
                self.pages.allocate(1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fill(self, data: Any) -> None:
        """Write the next page and enter it; one that is known already takes its place."""
        sequence = data.draw(st.sampled_from(self.sequences))
        at = sequence.entered
        if at == len(sequence.keys):
            return
        page, before = sequence.pages[at], sequence.pages[at - 1] if at else ROOT
        assert self.holders(page) == 1  # nobody else may hold a page that is written
        whole = sequence.keys[: at + 1]
        there = [other for other, content in self.content.items() if content == whole]
        known = self.pages.enter(page, before, sequence.keys[at])
        assert [known] == (there or [page])
        if there:
            self.pages.share(there)
            self.pages.release([page])
            sequence.pages[at] = known
        self.content[known] = whole
        sequence.entered += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.pages.release(sequence.pages)
        self.clock += 1
        for page in sequence.pages:
            self.used[page] = self.clock

    def holders(self, page: int) -> int:
        return sum(page in sequence.pages for sequence in self.sequences)

    @invariant()
    def counts_add_up(self) -> None:
        held = {page for sequence in self.sequences for page in sequence.pages}
        pages = self.pages
        assert pages._holders == [self.holders(page) for page in range(COUNT)]
        assert pages.held == len(held)
        assert pages.held + pages.cached + len(pages._free) == len(pages) == COUNT
        assert sorted([*held, *pages._cached, *pages._free]) == list(range(COUNT))

    @invariant()
    def the_tree_is_whole(self) -> None:
        """Every known page can be found from the root, and is not free."""
        pages = self.pages
        assert sorted(pages._found.values()) == sorted(pages._places) == sorted(self.content)
        for page, whole in self.content.items():
            assert pages.match(whole)[-1] == page
        assert not set(pages._free) & set(self.content)

    def teardown(self) -> None:
        while self.sequences:
            self.pages.release(self.sequences.pop().pages)
        assert self.pages.held == 0 and self.pages.available == COUNT
        assert len(set(self.pages.allocate(COUNT))) == COUNT
        assert not self.pages._found and not self.pages._places


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)
