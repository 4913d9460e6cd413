"""The scheduler against a deterministic fake: by rules of hypothesis, and by hand."""

import dataclasses
import functools
import itertools
import random
from collections import Counter, deque
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spmd.serving.engine import scheduler
from spmd.serving.engine.actions import EngineStep, Job
from spmd.serving.engine.backend import Limits, Sampling, SlotPart, Stepped
from spmd.serving.engine.draft_model import DraftedBackend
from spmd.serving.engine.groups import ROOT, Pages
from spmd.serving.engine.guide import Guide, counted_masks, words_of
from spmd.serving.engine.scheduler import Scheduler
from tests.serving.engine.fake_backend import LIMITS, FakeBackend

SMALL_POOL = dataclasses.replace(LIMITS, pages=20)
"""Less than a third of what all slots could hold."""

TWO_GROUPS = dataclasses.replace(SMALL_POOL, slots=6, groups=2)

GUESSED = dataclasses.replace(LIMITS, slots=8, drafts=3, pages=40)


class Run:
    """A scheduler with its backend, and all that came of every request."""

    def __init__(
        self, limits: Limits = LIMITS, *, budget: int = 6, draft: int = 0, **options: Any
    ) -> None:
        self.backend = FakeBackend(limits, letters=False, few=2 if limits.drafts else None)
        self.calls: Any = self.backend
        if draft:
            self.calls = DraftedBackend(self.backend, FakeBackend(limits, letters=False, few=draft))
            limits = dataclasses.replace(limits, draft_cost=0.05)
        self.scheduler = Scheduler(limits, budget, **options)
        self.budget = budget
        self.requests: dict[int, Job] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.ended: set[int] = set()  # by the caller, as if its text held a stop string
        self.cancelled: set[int] = set()
        self.steps: list[EngineStep] = []
        self.scores: dict[int, list[int]] = {}
        self.under_way: deque[tuple[EngineStep, Stepped]] = deque()
        self.unmasked: list[int] = []

    def submit(self, *requests: Job) -> None:
        self.scheduler.submit(requests)
        for request in requests:
            assert request.key not in self.requests
            self.requests[request.key] = request
            assert not request.guided or request.masks
            self.tokens[request.key] = []

    def step(self, between: Any = lambda: None) -> bool:
        """Begin a step, or finish the oldest; `between` runs while the backend is busy."""
        before = self.scheduler.counts.preempted
        step = self.scheduler.next()
        # Who is preempted is run again with all tokens that it drew, so they have to be known.
        assert not self.under_way or self.scheduler.counts.preempted == before
        orders = [request.order for request in self.scheduler._preempted]
        assert orders == sorted(orders)  # the oldest goes on first
        if step is not None:
            self._check(step)
            self.steps.append(step)
            for begin in step.begins:
                self.calls.begin(*begin)
            self.calls.allow(step.masks)
            self.under_way.append((step, self.calls.step(step.parts, step.alternatives)()))
        elif self.under_way:
            between()
            self._finish(*self.under_way.popleft())
        elif self.unmasked:
            self.mask(0)
        else:
            assert self.scheduler.idle  # there is always something to do
            return False
        return True

    def _check(self, step: EngineStep) -> None:
        limits = self.scheduler.limits
        rows = [0] * limits.groups
        for part in step.parts:
            rows[part.slot * limits.groups // limits.slots] += part.rows
        if step.decoding:
            few = step.decoding // limits.groups * scheduler.FEW <= self.scheduler._most
            largest = max(self.budget, limits.slots // limits.groups)
            assert max(rows) <= max(largest, self.scheduler._most if few else 0)
        assert step.rows == sum(rows)
        assert step.decoding == sum(part.tokens is None for part in step.parts)
        assert step.seen == sum(part.start + part.rows for part in step.parts)

    def _finish(self, step: EngineStep, results: Stepped) -> None:
        for key, part, scores in zip(step.keys, step.parts, results.scores, strict=True):
            if scores is not None:
                self.scores.setdefault(key, [])[part.start :] = scores.ids.tolist()
        ids = results.drawn.ids.tolist()
        for key, row, finish in self.scheduler.stepped(ids, results.drafts):
            assert key not in self.finished and key not in self.cancelled
            assert key not in self.ended
            if row is not None:
                self.tokens[key].append(ids[row])
                self.scheduler.counts.drawn += 1
            if finish:
                self.finished[key] = finish
            elif self.requests[key].guided:
                self.unmasked.append(key)

    def mask(self, index: int) -> None:
        """Give one of those who wait for it a mask, even if it has ended meanwhile."""
        key = self.unmasked.pop(index)
        self.scheduler.allow(key, guided_mask(self.tokens[key]))

    def _allowed(self, request: Job, drawn: list[int]) -> Any:
        if request.guided:
            return guided_mask(drawn)
        found = [mask for count, mask in request.masks if count <= len(drawn)]
        return found[-1] if found else None

    def cancel(self, *keys: int) -> None:
        for key in keys:
            if self.scheduler.cancel(key):
                assert key not in self.finished and key not in self.ended
                self.cancelled.add(key)

    def end(self, key: int) -> None:
        """End one because of its text; it goes on being known where it was over already."""
        self.scheduler.finish(key)
        if key not in self.finished and key not in self.cancelled:
            self.ended.add(key)

    def finish(self) -> None:
        for _ in range(100_000):
            if not self.step():
                break
        self.check_whole()

    def check_whole(self) -> None:
        """Nothing is lost, and everybody has what they would have had alone."""
        scheduler = self.scheduler
        assert scheduler.idle and not scheduler._decoding and not scheduler._preempted
        assert not scheduler._unmasked
        for group in scheduler.groups:
            assert not group.running and group.filling is None and group.pages.held == 0
            assert len(group._free) == scheduler.limits.slots // scheduler.limits.groups
        assert not scheduler._queue._users and not scheduler._queue._clients._served
        assert self.finished.keys() | self.cancelled | self.ended == self.requests.keys()
        for key, request in self.requests.items():
            expected = self.backend.alone(
                request.prompt,
                request.max_tokens,
                request.sampling.seed,
                functools.partial(self._allowed, request),
            )
            stops = [i for i, token in enumerate(expected) if token in request.stop_ids]
            expected = expected[: stops[0] + 1] if stops else expected
            got = self.tokens[key]
            assert got == expected[: len(got)]
            if key in self.finished:
                assert got == expected
                assert self.finished[key] == ("stop" if stops else "length")
                if request.score_prompt:
                    length = len(request.prompt)
                    assert self.scores[key][: length - 1] == list(request.prompt[1:])
                    assert len(self.scores[key]) == length

    def chunks(self, key: int) -> list[SlotPart]:
        pairs = (
            (k, part) for step in self.steps for k, part in zip(step.keys, step.parts, strict=True)
        )
        return [part for k, part in pairs if k == key and part.tokens is not None]

    def order(self) -> list[int]:
        """The requests in the order in which they got their first slots."""
        return list(dict.fromkeys(key for step in self.steps for key, _ in step.placed))


def guided_mask(drawn: list[int]) -> Any:
    """A mask that depends on all tokens before it."""
    return words_of((i for i in range(256) if (i + sum(drawn)) % 3), 256)


def drawn_in(call: tuple[EngineStep, Stepped]) -> int:
    """How many tokens a step drew that count."""
    step, results = call
    ids, count = iter(results.drawn.ids.tolist()), 0
    for part, drafts in zip(step.parts, results.drafts, strict=True):
        found = [next(ids) for _ in range(part.draws + len(drafts))]
        wrong = (i for i, d in enumerate(drafts) if found[i] != d)
        count += min(len(found), 1 + next(wrong, len(drafts)))
    return count


def rows_of(step: EngineStep) -> dict[int, tuple[int, int]]:
    """Key -> the first position and how many rows."""
    return {k: (part.start, part.rows) for k, part in zip(step.keys, step.parts, strict=True)}


def request(key: int, prompt: Any = (1, 2, 3), max_tokens: int = 4, **more: Any) -> Job:
    return Job(tuple(prompt), max_tokens, key=key, client=more.pop("client", "a"), **more)


PROMPTS = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    # Prompts that share beginnings with each other.
    st.integers(1, 50).map(lambda n: [7] * n),
    st.tuples(st.integers(1, 45), st.integers(0, 2)).map(lambda t: [*range(t[0]), 100 + t[1]]),
)


class Machine(RuleBasedStateMachine):
    """Requests come, go and are worked on in any order."""

    limits = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.key = 0

    @initialize(
        ahead=st.sampled_from([0, 1, 2]),
        budget=st.sampled_from([1, 6, 9]),
        seconds=st.dictionaries(st.integers(1, 9), st.sampled_from([0.5, 1, 4])),
        few=st.sampled_from([1, 2, 64]),
        turns=st.dictionaries(st.integers(1, 9), st.just(3)),
    )
    def start(
        self, ahead: int, budget: int, seconds: dict[int, float], few: int, turns: dict[int, int]
    ) -> None:
        self.run = Run(self.limits, budget=budget, ahead=ahead)
        seconds = {rows: 1e-3 * took for rows, took in seconds.items()}
        self.run.scheduler.know(seconds, turns, budget, self.limits.rows[-1])
        self.few = patch.object(scheduler, "FEW", few)
        self.few.start()

    def draw(self, prompt: list[int], tokens: int, client: str, flags: int) -> Job:
        self.key += 1
        stop_ids = frozenset(range(40)) if flags & 4 else frozenset[int]()
        masks = counted_masks(256, range(16, 256) if flags & 2 else (), stop_ids, 3)
        if guided := bool(flags & 8):
            masks = ((0, guided_mask([])),)
        return request(
            self.key,
            prompt,
            min(tokens, self.limits.longest - len(prompt)),
            client=client,
            score_prompt=bool(flags & 1),
            logprobs=1 if flags & 2 else None,
            stop_ids=stop_ids,
            masks=masks,
            guide=Mock(Guide) if guided else None,  # the test gives its masks
            sampling=Sampling(seed=flags & 2),
        )

    @rule(
        prompt=PROMPTS,
        tokens=st.integers(0, 20),
        client=st.sampled_from("abc"),
        flags=st.integers(0, 15),
        count=st.integers(1, 4),
    )
    def submit(self, prompt: Any, tokens: int, client: str, flags: int, count: int) -> None:
        self.run.submit(*(self.draw(prompt, tokens, client, flags) for _ in range(count)))

    @rule(count=st.integers(1, 12))
    def work(self, count: int) -> None:
        for _ in range(count):
            self.run.step()

    @precondition(lambda self: self.run.unmasked)
    @rule(data=st.data())
    def mask(self, data: Any) -> None:
        self.run.mask(data.draw(st.integers(0, len(self.run.unmasked) - 1)))

    @precondition(lambda self: self.run.requests)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.run.cancel(data.draw(st.sampled_from(sorted(self.run.requests))))

    @precondition(lambda self: self.run.requests)
    @rule(data=st.data())
    def cancel_during_a_step(self, data: Any) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.run.requests)), max_size=3))
        self.run.step(lambda: self.run.cancel(*keys))

    @precondition(lambda self: any(self.run.tokens.values()))
    @rule(data=st.data())
    def end_one_that_has_tokens(self, data: Any) -> None:
        known = sorted(key for key, tokens in self.run.tokens.items() if tokens)
        self.run.end(data.draw(st.sampled_from(known)))

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        run, scheduler = self.run, self.run.scheduler
        inside = scheduler.waiting + scheduler.running
        assert inside + len(run.finished) + len(run.cancelled) + len(run.ended) == len(run.requests)
        assert scheduler.running == sum(len(group.running) for group in scheduler.groups)

    @invariant()
    def pages_are_shared_only_where_they_are_known(self) -> None:
        for group in self.run.scheduler.groups:
            holders = [0] * len(group.pages)
            for request in group.running:
                for page in request.pages:
                    holders[page] += 1
                own = request.pages[request.entered :]
                assert all(group.pages._holders[page] == 1 for page in own)
            assert group.pages._holders == holders

    @invariant()
    def pools_are_whole(self) -> None:
        """A page is held, known or free; who comes to a known one finds all before it known."""
        for pages in (group.pages for group in self.run.scheduler.groups):
            held = [page for page, count in enumerate(pages._holders) if count]
            assert sorted([*held, *pages._cached, *pages._free]) == list(range(len(pages)))
            assert pages.held == len(held) and pages.cached == len(pages._cached)
            assert pages._places == {page: place for place, page in pages._found.items()}
            assert pages._places.keys() >= {before for before, _ in pages._found} - {ROOT}
            assert pages._cached.keys() <= pages._places.keys() <= {*held, *pages._cached}

    @invariant()
    def every_token_is_counted(self) -> None:
        counts, run = self.run.scheduler.counts, self.run
        assert counts.drawn == sum(map(len, run.tokens.values()))
        drawn = sum(map(drawn_in, run.under_way))
        assert counts.drawn + counts.wasted + drawn == run.backend.drawn
        parts = [part for step in run.steps for part in step.parts]
        decoded = sum(part.rows for part in parts if part.tokens is None)
        assert counts.prefilled + counts.repeated + decoded == run.backend.run
        if not counts.preempted:
            assert not counts.repeated
        # However often a prompt is run, it counts once.
        prompts = sum(len(request.prompt) for request in run.requests.values())
        assert counts.prefilled + counts.reused <= prompts

    def teardown(self) -> None:
        self.run.finish()
        self.few.stop()
        for client in "abc":  # each gets slots in its order
            mine = [key for key in self.run.order() if self.run.requests[key].client == client]
            assert mine == sorted(mine)


class SmallPool(Machine):
    """Requests take each other's pages."""

    limits = SMALL_POOL


class TwoGroups(Machine):
    """Slots and pages in two groups."""

    limits = TWO_GROUPS


class Guessed(Machine):
    """What comes next is guessed, of two tokens: often right, and often wrong."""

    limits = GUESSED


TestMachine = Machine.TestCase
TestGuessed = Guessed.TestCase
TestSmallPool = SmallPool.TestCase
TestTwoGroups = TwoGroups.TestCase
TestMachine.settings = settings(max_examples=20, stateful_step_count=25)
TestSmallPool.settings = TestTwoGroups.settings = TestMachine.settings
TestGuessed.settings = TestMachine.settings


def test_pages_are_forgotten_only_for_others_the_least_recently_used_first() -> None:
    pages = Pages(6)
    for keys in ([b"a", b"b"], [b"c"], [b"a", b"b"]):  # the first one is used again
        found = pages.match(keys)
        pages.share(found)
        own = pages.allocate(len(keys) - len(found))
        for i in range(len(found), len(keys)):
            before = (found + own)[i - 1] if i else ROOT
            assert pages.enter(own[i - len(found)], before, keys[i]) == own[i - len(found)]
        pages.release(found + own)
    assert (pages.held, pages.cached) == (0, 3)
    for taken, known in ((3, [1, 2]), (1, [0, 2]), (1, [0, 1])):
        pages.allocate(taken)
        assert [len(pages.match(keys)) for keys in ([b"c"], [b"a", b"b"])] == known
    with pytest.raises(ValueError, match="2 pages are wanted, 1 can be had"):
        pages.allocate(2)


def test_prompts_and_rows_that_draw_share_steps() -> None:
    """The example of the scheduler's docstring."""
    run = Run(dataclasses.replace(LIMITS, slots=3), budget=6, ahead=0)
    a, b, c = range(3)
    run.submit(*(request(key, [key] * n, 9) for key, n in ((a, 12), (b, 4), (c, 6))))
    run.finish()
    assert [rows_of(step) for step in run.steps[:5]] == [
        {a: (0, 8)},
        {a: (8, 4), b: (0, 4)},
        {a: (12, 1), b: (4, 1), c: (0, 4)},
        {a: (13, 1), b: (5, 1), c: (4, 2)},
        {a: (14, 1), b: (6, 1), c: (6, 1)},
    ]


def test_drafts_are_tried_once_the_last_token_is_known() -> None:
    """The example of the scheduler's docstring, with a text of one token."""
    run = Run(GUESSED, ahead=1)
    run.backend.alphabet = range(7, 8)
    run.submit(request(1, [7] * 15, 6))
    run.finish()
    assert [(rows_of(step)[1], len(step.parts[0].drafts)) for step in run.steps[2:]] == [
        ((15, 1), 0),  # the last position of a page has no room behind it
        ((16, 4), 3),
    ]
    assert run.tokens[1] == [7] * 6
    counts = run.scheduler.counts
    assert (counts.drafted, counts.accepted) == (3, 3)


@pytest.mark.parametrize(
    ("count", "known", "drafts"),
    [
        (2, {}, 2), (2, {4: 1, 8: 1.2}, 3), (2, {4: 1, 8: 9}, 2), (2, {2: 1, 4: 9}, 0),
        (3, {8: 1}, 3), (1, {4: 1}, 3),
    ],
)  # fmt: skip
def test_drafts_are_tried_where_tokens_come_faster(count: int, known: Any, drafts: int) -> None:
    run = Run(GUESSED, budget=16)
    run.scheduler.know(known, {}, 16)
    run.backend.alphabet = range(1)
    run.submit(*(request(key, [0] * 8, 30) for key in range(count)))
    run.finish()
    full = [step for step in run.steps if step.decoding == count]
    assert max(len(part.drafts) for step in full for part in step.parts) == drafts


def test_who_has_drafts_is_in_every_other_step_and_the_rest_in_all() -> None:
    scheduler = Scheduler(dataclasses.replace(GUESSED, rows=(4, 8), page=64), 8)
    scheduler.know({4: 0.01, 8: 0.01}, {}, 8)
    new, under_way, steps = itertools.count(10), deque[EngineStep](), list[dict[int, int]]()
    prompts = [[0, 1, 0, 1, 0], *([next(new), next(new)] for _ in range(3))]
    scheduler.submit([request(key, prompt, 40) for key, prompt in enumerate(prompts)])
    while not scheduler.idle:
        if (step := scheduler.next()) is not None:
            under_way.append(step)
            steps.append({k: len(p.drafts) for k, p in zip(step.keys, step.parts, strict=True)})
            continue
        step = under_way.popleft()
        parts = dict(zip(step.keys, step.parts, strict=True)).items()
        # The first one says 0 1 0 1 ..., the others say nothing twice.
        each = [next(new) if k else (p.start + 1 + i) % 2 for k, p in parts for i in range(p.drawn)]
        scheduler.stepped(each, [p.drafts for _, p in parts])
    between = steps[5:13]
    assert all(set(step) >= {1, 2, 3} for step in between)
    assert [step.get(0) for step in between] == [None, 3] * 4
    assert scheduler.counts.accepted == scheduler.counts.drafted


@pytest.mark.parametrize("tokens", [256, 200])
def test_a_draft_model_that_is_the_model_is_always_right(tokens: int) -> None:
    """Behind prompts in others' pages, preemptions, masks, and steps in which it does not guess."""
    totals = Counter[str]()
    for seed in range(20):
        rng = random.Random(seed)
        run = Run(dataclasses.replace(GUESSED, pages=17), draft=tokens, ahead=seed % 3)
        run.backend.alphabet = range(256)  # nothing is said twice
        masks = counted_masks(256, range(16, 256), frozenset(range(40, 200)), 5)
        for key in range(6):
            sampling = Sampling(seed=key % 2, frequency_penalty=0.5)
            prompt, more = [rng.choice((1, 2))] * rng.randint(1, 30), masks if key % 2 else ()
            run.submit(request(key, prompt, 20, sampling=sampling, masks=more))
            for _ in range(rng.randint(0, 12)):
                run.step()
        run.finish()
        totals.update(vars(run.scheduler.counts))
    assert totals["drafted"] > 50 and totals["preempted"] and totals["reused"]
    assert (totals["accepted"] == totals["drafted"]) == (tokens == 256)


@pytest.mark.parametrize(
    ("drawing", "more", "chunks"),
    [
        (0, {8: 1.9}, [6]), (0, {8: 2.1}, [4, 2]), (0, {}, [4, 2]),
        (1, {8: 1.7}, [6]), (1, {8: 1.8}, [3, 3]),
    ],
)  # fmt: skip
def test_a_step_is_no_larger_than_is_worth_its_padding(
    drawing: int, more: Any, chunks: list[int]
) -> None:
    run = Run(budget=8)
    run.scheduler.know({4: 1.0, **more}, {}, 8)
    run.submit(*[request(9, [2], 20)] * drawing)
    run.step()
    run.submit(request(0, [1] * 6, 1))
    run.finish()
    assert [len(chunk.tokens or ()) for chunk in run.chunks(0)] == chunks


@pytest.mark.parametrize(("most", "few", "chunk"), [(0, 4, 3), (8, 4, 7), (8, 9, 3)])
def test_many_prompts_fill_a_larger_step_beside_few_that_draw(
    most: int, few: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "FEW", few)
    run = Run()
    run.scheduler.know({4: 1.0, 8: 1.5}, {}, 4, most)
    run.submit(request(0, [1], 20))
    run.step()
    run.submit(request(1, [2] * 7, 1), request(2, [3] * 7, 1))
    run.finish()
    assert len(run.chunks(1)[0].tokens or ()) == chunk


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="9 slots of a group cannot draw in steps of 8 rows"):
        Scheduler(dataclasses.replace(LIMITS, slots=18, groups=2), 8)
    with pytest.raises(RuntimeError, match="no step is under way"):
        Scheduler(LIMITS, 8).stepped([], [])
    run = Run()
    for prompt, max_tokens in ((), 1), ((1,), -1), ((1,) * 60, 5), ((1,) * 65, 0):
        with pytest.raises(ValueError, match="a sequence has 1 to 64"):
            run.submit(request(1, prompt, max_tokens))
    assert run.scheduler.idle
    with pytest.raises(ValueError, match="a prompt of 8 tokens and 5 more: a sequence has 1 to 12"):
        Run(dataclasses.replace(LIMITS, pages=3)).submit(request(1, range(8), 5))


def test_the_youngest_gives_way_and_goes_on_before_those_that_wait() -> None:
    run = Run(SMALL_POOL)
    run.submit(*(request(key, [key] * 9, 50, client="ab"[key % 2]) for key in range(4)))
    while not run.scheduler._preempted:
        assert run.step()
    youngest = run.scheduler._preempted[0].key
    assert youngest == run.order()[-1] == 3
    had = len(run.tokens[youngest])
    assert had > 1
    run.submit(request(9, [9], 1))
    run.finish()
    again = [part for part in run.chunks(youngest) if part.start >= 9][-1]
    assert again.draws and again.start + len(again.tokens or ()) >= 9 + had
    placed = [key for step in run.steps for key, _ in step.placed]
    assert placed.index(9) > placed.index(youngest, 4)
    (begin, resumed) = [b for s in run.steps for b in s.begins if b.seen[0] == youngest][:2]
    assert begin.drawn == () and len(resumed.drawn) >= had
    assert resumed.seen == (*[youngest] * 9, *resumed.drawn)
    assert placed.count(0) == 1  # the oldest
    counts = run.scheduler.counts
    assert counts.prefilled + counts.reused == sum(len(r.prompt) for r in run.requests.values())


def test_a_request_waits_until_those_that_run_have_a_page_to_spare() -> None:
    run = Run(dataclasses.replace(LIMITS, pages=7))
    run.submit(*(request(key, [key] * 8, 3) for key in range(3)))
    while len(run.order()) < 2 or len(run.steps) < 3:
        run.step()
    # 2 pages and some rows are left, but two requests run.
    assert run.scheduler.groups[0].pages.available == 2
    assert run.steps[-1].rows < run.budget and run.order() == [0, 1]
    run.finish()


@pytest.mark.parametrize(("length", "runs"), [(30, 2), (32, 4), (33, 1)])
def test_the_same_prompt_again_runs_its_last_page(length: int, runs: int) -> None:
    run = Run()
    for key in (1, 2):
        run.submit(request(key, range(length), 9, sampling=Sampling(seed=key)))
        run.finish()
    assert [part.rows for part in run.chunks(2)] == [runs]
    # What was drawn behind it is known as well, though the page before was there twice.
    run.submit(request(3, [*range(length), *run.tokens[2]], 1))
    run.finish()
    assert run.chunks(3)[0].start == (length + 8) // 4 * 4


def test_groups_share_the_work_but_go_where_a_beginning_is() -> None:
    run = Run(dataclasses.replace(LIMITS, slots=8, groups=2))
    run.submit(*(request(key, [key] * 8, 4) for key in range(8)))
    run.step()
    first = run.steps[0]
    assert [part.slot // 4 for part in first.parts] == [0, 1]
    assert first.rows == 16
    run.finish()
    assert {part.slot for step in run.steps for part in step.parts} == set(range(8))
    again = next(part.slot // 4 for part in run.chunks(5))
    run.submit(request(100, [5] * 9, 1))
    run.finish()
    assert [(part.slot // 4, part.start) for part in run.chunks(100)] == [(again, 8)]
    # A short common beginning does not fill one group.
    run = Run(dataclasses.replace(LIMITS, slots=8, groups=2, rows=(64,)))
    run.submit(*(request(key, [1, 2, 3, 4, key, key], 40) for key in range(4)))
    run.step()
    assert [len(group.running) for group in run.scheduler.groups] == [2, 2]


def test_a_client_says_which_of_its_requests_are_first() -> None:
    run = Run(dataclasses.replace(LIMITS, slots=1))
    of_a = [
        ("a", user, priority) for user, priority in zip("uuvuv", (0, 5, 3, -1, -1), strict=True)
    ]
    asked = [*of_a[:4], ("b", "u", 9), of_a[4]]
    for key, (client, user, priority) in enumerate(asked):
        run.submit(request(key, [key], 1, client=client, user=user, priority=priority))
    run.finish()
    begun = [key for step in run.steps for key, _ in step.placed]
    assert [key for key in begun if key != 4] == [3, 5, 0, 2, 1]
    assert begun.index(4) < 2  # it waits for no more than its turn


def test_no_flow_of_newcomers_keeps_anybody_waiting() -> None:
    run = Run()
    run.submit(request(1, [3] * 40, 20, client="old"))
    while not run.tokens[1]:
        run.step()
    assert run.scheduler.running == 1
    run.submit(request(99, client="old"))
    key = 1000
    while 99 not in run.order():
        while run.scheduler.waiting < 5:  # there are always some who were never served
            key += 1
            run.submit(request(key, [key % 256] * 20, 4, client=f"new {key}"))
        run.step()
        assert key < 1100
    run.finish()


def test_names_are_forgotten() -> None:
    """While somebody stays; `Run.finish` looks whether any is left where nobody does."""
    run = Run()
    queue = run.scheduler._queue
    masks = ((0, guided_mask([])),)  # and the next one comes when all else is done
    run.submit(request(1000, client="stays", guide=Mock(Guide), masks=masks))
    for key in range(2000, 2150):
        more = {"client": f"client {key}"} if key % 2 else {"client": "stays", "user": f"{key}"}
        run.submit(request(key, [key % 256] * 8, 2, **more))
        for _ in range(6):
            run.step()
    assert len(queue._clients._served) < 60
    assert sum(len(users._served) for users in queue._users.values()) < 60
    run.finish()


def test_many_names_of_users_gain_a_client_nothing() -> None:
    run = Run()
    for key in range(60):
        run.submit(request(key, [key] * 8, 8, client="many", user=f"user {key}"))
    for _ in range(20):
        run.step()
    run.submit(request(99, [99] * 8, 8, client="one"))
    before = len(run.finished)
    while 99 not in run.finished:
        run.step()
    # Those that have a slot already, and as many again.
    assert len(run.finished) - before <= 2 * LIMITS.slots
    run.finish()


@pytest.mark.parametrize("kind", ["client", "user"])
def test_what_clients_and_their_users_ask_is_shared_equally(kind: str) -> None:
    run, lengths = Run(), {"short": 2, "long": 32}
    for key in range(200):
        name = ("short", "long")[key % 2]
        run.submit(request(key, [key % 7] * lengths[name], 8, **{"client": "all", kind: name}))
    for _ in range(400):
        run.step()
    served = Counter(getattr(run.requests[key], kind) for key in run.finished)
    # Reused tokens are not charged: shares of what is computed are equal, not of what is asked.
    assert served["short"] * (2 + 8) > 0.5 * served["long"] * (32 + 8) > 0


@pytest.mark.parametrize("pages", [11, 12, 13, 80])
def test_drafts_leave_room_for_what_prompts_draw(pages: int) -> None:
    """Also for who fits only since another prompt with the same beginning has been run."""
    limits = dataclasses.replace(GUESSED, rows=(1, 8, 64), page=16, pages=pages, drafts=7)
    for steps in range(3, 16):  # the backend refuses to draw more than it has slots
        run = Run(dataclasses.replace(limits, max_length=256), budget=64)
        run.scheduler.know({1: 8e-3, 8: 8.1e-3, 64: 9e-3}, {}, 32, 64)
        run.backend.alphabet = range(1)
        run.submit(*(request(key, [0] * 9, 40) for key in (1, 2)))
        for _ in range(steps):
            run.step()
        run.submit(*(request(key, range(100, 145 + key), 4) for key in (3, 4)))
        run.finish()
        assert run.scheduler.counts.accepted > 9
