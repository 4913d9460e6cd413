"""The scheduler against a deterministic fake: by rules of hypothesis, and by hand."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.engine.actions import Copy, Counts, Decode, Prefill, Progress, QueueFull, Request
from serving.engine.backend import Sampling
from serving.engine.scheduler import Scheduler
from tests.serving.engine.fake_backend import LIMITS, FakeBackend


class Run:
    """A scheduler with its backend, and all that came of every request."""

    def __init__(self, backend: FakeBackend | None = None, **options: Any) -> None:
        self.backend = backend or FakeBackend(letters=False)
        self.scheduler = Scheduler(self.backend.limits, **options)
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.ended: set[int] = set()  # by the caller, as if its text held a stop string
        self.cancelled: set[int] = set()
        self.actions: list[Any] = []
        self.decoding: set[int] = set()
        self.under_way: deque[tuple[Any, Any]] = deque()

    def submit(self, *requests: Request) -> None:
        self.scheduler.submit(requests)
        for request in requests:
            assert request.key not in self.requests
            self.requests[request.key] = request
            self.tokens[request.key] = []

    def step(self, between: Any = lambda: None) -> bool:
        """Begin an action, or finish the oldest; `between` runs while the backend is busy."""
        action = self.scheduler.next()
        if action is None and not self.under_way:
            return False
        if action is None:
            between()
            self._finish(*self.under_way.popleft())
            return True
        # Between two chunks there is a decode, unless nothing decodes.
        previous = next((a for a in reversed(self.actions) if not isinstance(a, Copy)), None)
        if isinstance(previous, Prefill) and self.decoding - self.cancelled - self.ended:
            assert isinstance(action, Decode)
        self.actions.append(action)
        match action:
            case Copy():
                self.backend.copy(action.source, action.target, action.length)
                self.under_way.append((action, None))
            case Prefill():
                later = self.backend.prefill(
                    action.slot, action.tokens, action.start,
                    sampling=action.sampling, targets=action.targets,
                )  # fmt: skip
                self.under_way.append((action, later()))
            case Decode():
                later_too = self.backend.decode(action.active, action.steps, action.alternatives)
                self.under_way.append((action, later_too()))
        return True

    def _finish(self, action: Any, results: Any) -> None:
        match action:
            case Copy():
                self.scheduler.copied()
            case Prefill():
                first = None if results.first is None else int(results.first.ids[0])
                progress = self.scheduler.prefilled(first)
                self._note([progress] if progress else [], [[first]] * LIMITS.slots)
            case Decode():
                ids = results.ids.T.tolist()
                self._note(self.scheduler.decoded(ids), ids)

    def _note(self, progress: list[Progress], ids: Any) -> None:
        for key, slot, count, finish in progress:
            assert key not in self.finished and key not in self.cancelled
            assert key not in self.ended
            self.tokens[key] += ids[slot][:count]
            self.scheduler.count(count)
            self.decoding.add(key)
            if finish:
                self.finished[key] = finish
                self.decoding.remove(key)

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
            self.decoding.discard(key)

    def finish(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.step():
                break
        assert self.scheduler.idle
        self.check_whole()

    def check_whole(self) -> None:
        """Nothing is lost, and everybody has what they would have had alone."""
        assert self.scheduler.slots.owners == (None,) * LIMITS.slots
        assert not self.scheduler._queue._present and not self.scheduler._queue._served
        assert self.finished.keys() | self.cancelled | self.ended == self.requests.keys()
        for key, request in self.requests.items():
            expected = self.backend.alone(request.prompt, request.max_tokens, request.sampling.seed)
            stops = [i for i, token in enumerate(expected) if token in request.stop_ids]
            expected = expected[: stops[0] + 1] if stops else expected
            got = self.tokens[key]
            assert got == expected[: len(got)]
            if key in self.finished:
                assert got == expected
                assert self.finished[key] == ("stop" if stops else "length")


def request(key: int, prompt: Any = (1, 2, 3), max_tokens: int = 4, **more: Any) -> Request:
    return Request(key, more.pop("client", "a"), tuple(prompt), max_tokens, **more)


PROMPTS = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    # Prompts that share beginnings with each other.
    st.integers(1, 50).map(lambda n: [7] * n),
    st.tuples(st.integers(1, 45), st.integers(0, 2)).map(lambda t: [*range(t[0]), 100 + t[1]]),
)


class Machine(RuleBasedStateMachine):
    """Requests come, go and are worked on in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(max_waiting=12, steps=4)
        self.key = 0

    def draw(self, prompt: list[int], tokens: int, client: str, flags: int) -> Request:
        self.key += 1
        return request(
            self.key,
            prompt,
            min(tokens, LIMITS.max_length - len(prompt)),
            client=client,
            interactive=bool(flags & 1),
            score_prompt=bool(flags & 2),
            stop_ids=frozenset(range(40)) if flags & 4 else frozenset(),
            sampling=Sampling(seed=flags),
        )

    @rule(
        prompt=PROMPTS,
        tokens=st.integers(0, 20),
        client=st.sampled_from("abc"),
        flags=st.integers(0, 7),
        count=st.integers(1, 4),
    )
    def submit(self, prompt: Any, tokens: int, client: str, flags: int, count: int) -> None:
        requests = [self.draw(prompt, tokens, client, flags) for _ in range(count)]
        scheduler = self.run.scheduler
        inside = scheduler.waiting + scheduler.running
        if inside + count > 12 + LIMITS.slots:
            with pytest.raises(QueueFull):
                self.run.submit(*requests)
            assert scheduler.waiting + scheduler.running == inside
        else:
            self.run.submit(*requests)

    @rule(count=st.integers(1, 12))
    def work(self, count: int) -> None:
        for _ in range(count):
            self.run.step()

    @precondition(lambda self: self.run.requests)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.run.cancel(data.draw(st.sampled_from(sorted(self.run.requests))))

    @precondition(lambda self: self.run.requests)
    @rule(data=st.data())
    def cancel_during_an_action(self, data: Any) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.run.requests)), max_size=3))
        self.run.step(lambda: self.run.cancel(*keys))

    @precondition(lambda self: any(self.run.tokens.values()))
    @rule(data=st.data())
    def end_one_that_has_tokens(self, data: Any) -> None:
        known = sorted(key for key, tokens in self.run.tokens.items() if tokens)
        self.run.end(data.draw(st.sampled_from(known)))

    @invariant()
    def no_slot_is_in_two_hands(self) -> None:
        owners = [owner for owner in self.run.scheduler.slots.owners if owner is not None]
        assert len(set(owners)) == len(owners) == self.run.scheduler.running

    @invariant()
    def slots_hold_what_the_scheduler_believes(self) -> None:
        for slot, held in enumerate(self.run.backend.held):
            believed = self.run.scheduler.slots.content(slot).tolist()
            assert believed == held[: len(believed)]

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        run = self.run
        inside = run.scheduler.waiting + run.scheduler.running
        over = len(run.finished) + len(run.cancelled) + len(run.ended)
        assert inside + over == len(run.requests)

    @invariant()
    def every_token_is_counted(self) -> None:
        counts = self.run.scheduler.counts
        assert counts.drawn == sum(map(len, self.run.tokens.values()))
        assert counts.prefilled == self.run.backend.prefilled

    def teardown(self) -> None:
        self.run.finish()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=25)


def test_a_long_prompt_does_not_stop_those_that_decode() -> None:
    run = Run(steps=2)
    run.submit(request(1, max_tokens=30))
    run.step()
    run.submit(request(2, range(48), 4))
    run.finish()
    kinds = "".join(type(action).__name__[0] for action in run.actions)
    assert kinds.startswith("PDPDPDPDPDPDPD")


def test_steps_are_single_while_somebody_watches() -> None:
    run = Run()
    run.submit(request(1, max_tokens=21), request(2, max_tokens=5, interactive=True))
    run.finish()
    steps = [(a.steps, 2 in a.keys) for a in run.actions if isinstance(a, Decode)]
    assert {n for n, watched in steps if watched} == {1}
    assert max(n for n, watched in steps if not watched) == 5  # two calls are under way


def test_steps_are_single_while_prompts_could_be_filled_in() -> None:
    run = Run()
    run.submit(*(request(key, [key] * 9, max_tokens=30) for key in range(8)))
    run.finish()
    steps = [a.steps for a in run.actions if isinstance(a, Decode)]
    assert steps[:8] == [1, 1, 1, 1, 1, 1, 5, 5]  # two chunks each; then all slots are taken
    run.check_whole()


def test_steps_end_with_the_last_wish_and_at_the_end_of_a_slot() -> None:
    run = Run()
    run.submit(request(1, max_tokens=4))
    run.finish()
    assert [a.steps for a in run.actions if isinstance(a, Decode)] == [3]  # and none after it
    assert run.scheduler.counts.wasted == 0
    run = Run()
    run.submit(request(1, [5] * 60, 4), request(2, [6], 60))
    run.finish()
    assert run.scheduler.counts.drawn == 64


def stopped_after(drawn: int, interactive: bool = False, **options: Any) -> int:
    """How many tokens are wasted if the end shows after so many."""
    run = Run(**options)
    alone = run.backend.alone((1, 2, 3), 40)
    stop = alone[drawn - 1]
    assert stop not in alone[: drawn - 1]
    run.submit(request(1, max_tokens=40, stop_ids=frozenset([stop]), interactive=interactive))
    run.finish()
    assert run.tokens[1] == alone[:drawn]
    assert run.finished[1] == "stop"
    counts = run.scheduler.counts
    assert counts.drawn == drawn
    return counts.wasted


def test_what_comes_after_the_end_is_dropped_and_counted() -> None:
    assert stopped_after(4) == 7  # two of the call it ended in, and the next one
    wasted = [stopped_after(drawn) for drawn in range(2, 25)]
    assert max(wasted) == 9 and min(wasted) == 5
    assert stopped_after(4, steps=7) == 3  # calls of three
    assert {stopped_after(drawn, interactive=True) for drawn in range(2, 12)} == {1}
    assert {stopped_after(drawn, interactive=True, ahead=0) for drawn in range(2, 12)} == {0}
    assert max(stopped_after(drawn, ahead=0) for drawn in range(2, 25)) == 9


def test_the_caller_can_finish_a_request_early() -> None:
    run = Run()
    run.submit(request(1, max_tokens=20))
    while len(run.tokens[1]) < 6:
        run.step()
    run.end(1)
    run.end(1)  # it is over
    counts = run.scheduler.counts
    assert (counts.drawn, counts.wasted, counts.cancelled) == (6, 0, 0)
    assert run.scheduler.idle and run.scheduler.next() is None
    assert run.step() and not run.step()  # the call that had begun
    assert counts.wasted == 5


def test_a_conversation_goes_on_in_its_slot() -> None:
    run = Run()
    prompt = tuple(range(20))
    run.submit(request(1, prompt, 5))
    run.finish()
    first = run.tokens[1]
    run.submit(request(2, (*prompt, *first, 9, 9), 5))
    run.finish()
    assert not any(isinstance(action, Copy) for action in run.actions)
    # All but the last drawn token are in the slot.
    assert run.scheduler.counts.reused == 24


def test_the_same_prompt_again_prefills_its_last_token() -> None:
    run = Run()
    for key in (1, 2):
        run.submit(request(key, range(30), 5))
        run.finish()
    assert [a.size for a in run.actions if isinstance(a, Prefill)] == [8, 8, 8, 6, 1]


def test_choices_of_one_prompt_copy_it_from_the_first() -> None:
    run = Run()
    run.submit(*(request(key, range(30), 8, sampling=Sampling(seed=key)) for key in (1, 2, 3, 4)))
    run.finish()
    copies = [action for action in run.actions if isinstance(action, Copy)]
    assert [(copy.key, copy.length) for copy in copies] == [(2, 29), (3, 29), (4, 29)]
    assert run.scheduler.counts.prefilled == 30 + 3
    assert len({tuple(tokens) for tokens in run.tokens.values()}) == 4


def test_a_short_common_beginning_costs_no_slot_its_tokens() -> None:
    run = Run()
    run.submit(request(1, range(40), 2))
    run.finish()
    run.submit(request(2, [*range(5), 99], 2))
    run.finish()
    assert run.scheduler.slots.length(0) == 41
    run.submit(request(3, range(40), 2))
    run.finish()
    assert run.scheduler.counts.reused == 39


def test_the_slot_used_longest_ago_is_given_away_first() -> None:
    run = Run()
    for key in range(1, 6):
        run.submit(request(key, [key] * 10, 2))
        run.finish()
    assert [a.slot for a in run.actions if isinstance(a, Prefill) and a.start == 0] == [
        0, 1, 2, 3, 0,
    ]  # fmt: skip


def test_prompts_to_be_scored_are_not_reused() -> None:
    run = Run()
    run.submit(request(1, range(10), 1))
    run.finish()
    run.submit(request(2, range(10), 0, score_prompt=True))
    run.finish()
    chunks = [action for action in run.actions if isinstance(action, Prefill)][-2:]
    assert [chunk.targets for chunk in chunks] == [tuple(range(1, 9)), (9, 0)]
    assert [chunk.sampling for chunk in chunks] == [None, None]
    assert run.finished[2] == "length" and run.tokens[2] == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [((), 1), ((1,), -1), ((1,) * 60, 5), ((1,) * 65, 0)]
)
def test_what_no_slot_holds_is_refused(prompt: Any, max_tokens: int) -> None:
    run = Run()
    with pytest.raises(ValueError, match="a slot holds 1 to 64"):
        run.submit(request(1, prompt, max_tokens))
    assert run.scheduler.idle


def test_the_queue_takes_all_or_none() -> None:
    run = Run(max_waiting=3)
    run.submit(*map(request, range(5)))
    with pytest.raises(QueueFull, match="5 requests wait for a slot, 3 may"):
        run.submit(*map(request, range(5, 8)))
    run.submit(*map(request, range(8, 10)))
    run.finish()
    assert set(run.finished) == {*range(5), 8, 9}


def test_calls_out_of_turn_are_mistakes() -> None:
    scheduler = Scheduler(LIMITS)
    for call in (scheduler.copied, lambda: scheduler.prefilled(1), lambda: scheduler.decoded([])):
        with pytest.raises(RuntimeError, match="is to be done next, but None"):
            call()
    scheduler.submit([request(1)])
    assert [type(scheduler.next()) for _ in range(3)] == [Prefill, Decode, type(None)]
    with pytest.raises(RuntimeError, match="no Decode is to be done next, but Prefill"):
        scheduler.decoded([])


def test_every_drawn_token_is_somebodys_or_wasted() -> None:
    """Whatever ends early: by itself, by its text, or because its reader left."""
    rng = random.Random(0)
    for _ in range(30):
        run = Run(steps=rng.choice([1, 4, 10]), ahead=rng.choice([0, 1, 2]))
        for key in range(12):
            stops = frozenset(rng.sample(range(256), 20))
            prompt = [rng.randrange(3)] * rng.randint(1, 30)
            run.submit(request(key, prompt, rng.randint(1, 30), stop_ids=stops))
        while run.step():
            if rng.random() < 0.1:
                run.cancel(rng.randrange(12))
            with_tokens = [key for key, tokens in run.tokens.items() if tokens]
            if with_tokens and rng.random() < 0.1:
                run.end(rng.choice(with_tokens))
        run.check_whole()
        calls = [a for a in run.actions if not isinstance(a, Copy)]
        drawn = sum(
            a.sampling is not None if isinstance(a, Prefill) else a.steps * sum(a.active)
            for a in calls
        )
        counts = run.scheduler.counts
        assert counts.drawn + counts.wasted == drawn


def test_a_slot_is_given_away_while_a_call_still_writes_to_it() -> None:
    run = Run()
    alone = run.backend.alone((1, 2, 3), 40)
    run.submit(*(request(k, (1, 2, 3), 40, sampling=Sampling(seed=9)) for k in (2, 3, 4)))
    run.submit(request(1, max_tokens=40, stop_ids=frozenset(alone[6:7])), request(5, [8] * 9, 30))
    run.finish()
    starts = [a for a in run.actions if isinstance(a, Prefill) and a.start == 0]
    assert starts[-1].key == 5 and starts[-1].slot == starts[-2].slot
    assert run.scheduler.counts.wasted


def order(run: Run) -> list[int]:
    """The requests in the order in which they got their slots."""
    return list(dict.fromkeys(a.key for a in run.actions if isinstance(a, Prefill)))


def test_first_come_first_served_within_a_client() -> None:
    run = Run()
    rng = random.Random(0)
    keys: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for key in range(60):
        client = rng.choice("abc")
        keys[client].append(key)
        run.submit(request(key, [rng.randrange(9)] * rng.randint(1, 30), 4, client=client))
    run.finish()
    for client, mine in keys.items():
        assert [key for key in order(run) if run.requests[key].client == client] == mine


def test_a_client_with_few_requests_does_not_wait_for_one_with_many() -> None:
    run = Run()
    run.submit(*(request(key, [key] * 9, 9, client="many") for key in range(100)))
    for _ in range(20):
        run.step()
    run.submit(request(200, client="few"), request(201, client="few"))
    taken = len(order(run))
    run.finish()
    assert set(order(run)[taken : taken + 4]) >= {200, 201}


def test_equal_clients_get_equal_shares() -> None:
    run = Run(max_waiting=1000)
    lengths = {"short": 2, "long": 32}
    for key in range(200):
        client = ("short", "long")[key % 2]
        run.submit(request(key, [key % 7] * lengths[client], 8, client=client))
    for _ in range(400):
        run.step()
    served = {
        client: sum(
            len(r.prompt) + len(run.tokens[k])
            for k, r in run.requests.items()
            if r.client == client and k in run.finished
        )
        for client in lengths
    }
    # Reused tokens are not charged: shares of what is computed are equal, not of what is asked.
    assert served["short"] > 0.5 * served["long"] > 0


def test_no_flow_of_newcomers_keeps_anybody_waiting() -> None:
    run = Run(max_waiting=50)
    run.submit(request(1, [3] * 40, 20, client="old"))
    while not run.tokens[1]:
        run.step()
    assert run.scheduler.running == 1
    run.submit(request(99, client="old"))
    key = 1000
    while 99 not in order(run):
        while run.scheduler.waiting < 5:  # there are always some who were never served
            key += 1
            run.submit(request(key, [key % 256] * 20, 4, client=f"new {key}"))
        run.step()
        assert key < 1100
    run.finish()


def test_names_of_clients_are_forgotten() -> None:
    run = Run()
    for key in range(500):
        run.submit(request(key, [key % 256] * 8, 2, client=f"client {key}"))
        if key % 4 == 3:
            run.finish()
    queue = run.scheduler._queue
    assert not queue._served and not queue._present and not queue._lines
    run.submit(request(1000, max_tokens=40, client="stays"))
    for key in range(2000, 2300):
        run.submit(request(key, [key % 256] * 8, 2, client=f"client {key}"))
        for _ in range(6):
            run.step()
    assert len(queue._served) < 60
    run.finish()


def test_counts_start_at_zero() -> None:
    assert set(dataclasses.astuple(Counts())) == {0}
