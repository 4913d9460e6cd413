"""A backend without a model, which holds its caller to the contract of serving/engine/backend.py.

Pages hold what stands for keys and values: for each position a hash of all tokens up to it, made of
the hash before, which is read through the pages. The next token is a hash of what all pages of a
sequence say, and of how it is drawn. So a wrong page, position, or token shows at once.
"""

import math
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.serving.engine.backend import Limits, Sampling, SlotPart, Stepped, Tokens, Words
from tests.waiting import PATIENCE

LIMITS = Limits(
    slots=4, max_length=64, rows=(4, 8), groups=1, page=4, pages=64, top_logprobs=5, vocab_size=256
)

EMPTY = -1
"""What a page says where nothing was written."""

Allowed = Callable[[list[int]], Words | None]


class Gate:
    """What results wait behind: it stands open, or lets only so many more through."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = math.inf

    def open(self) -> None:
        self.close(after=math.inf)

    def close(self, after: float = 0) -> None:
        """Lets `after` more results through, and then none."""
        with self._changed:
            self._left = after
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0, PATIENCE)
            self._left -= 1


def key_value(before: int, token: int) -> int:
    """What stands for the key and value of a token behind others."""
    return zlib.crc32(token.to_bytes(4, "little"), before)


def chosen(token: int, sampling: Sampling, allowed: Words | None, vocab_size: int) -> int:
    """The token, if it may be drawn and no bias is higher; else one that may, by its number."""
    bias = np.zeros(vocab_size)
    for biased, added in sampling.logit_bias:
        bias[biased] = added
    if allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:vocab_size]
        bias = np.where(bits, bias, -np.inf)
    best = np.flatnonzero(bias == bias.max())
    return token if token in best else int(best[token % len(best)])


class FakeBackend:
    """Deterministic; results take `latency` seconds; after `fail_after` calls it raises.

    While its gate is closed results do not come. Tokens are letters if `letters`, else of `few`
    kinds, which are easy to guess, or all.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        *,
        budget: int = 6,
        latency: float = 0.0,
        letters: bool = True,
        few: int | None = None,
        fail_after: int | None = None,
    ) -> None:
        self.limits = limits
        self.seconds: Mapping[int, float] = {}
        self.turns: Mapping[int, int] = {}
        self.budget = budget
        self.latency = latency
        text = b"abcdefghijklmnopqrstuvwxyz      "
        self.alphabet = text if letters else range(few or limits.vocab_size)
        self.fail_after = fail_after
        self.compile_total = 3
        self.info: dict[str, Any] = {
            "mesh": "fake", "device_kind": "fake", "bandwidth": 1e9,
            "read_weight_bytes": 1_000_000, "token_bytes": 1000,
        }  # fmt: skip
        self.calls = 0
        self.gate = Gate()
        self.run = 0
        self.drawn = 0
        self.pools = np.full((limits.groups, limits.pages, limits.page), EMPTY, np.int64)
        self.latest: list[int | None] = [None] * limits.slots
        self.sampling: list[Sampling | None] = [None] * limits.slots
        self.seen: list[set[int]] = [set() for _ in range(limits.slots)]
        self.counted: list[Counter[int]] = [Counter() for _ in range(limits.slots)]
        self.allowed: list[Words | None] = [None] * limits.slots
        self._busy = threading.Lock()

    def begin(
        self, slot: int, sampling: Sampling, seen: Sequence[int], drawn: Sequence[int] = ()
    ) -> None:
        with self._busy:
            self.sampling[slot] = sampling
            self.seen[slot] = set(seen)
            self.counted[slot] = Counter(drawn)
            self.allowed[slot] = None

    def allow(self, masks: Mapping[int, Words | None]) -> None:
        with self._busy:
            for slot, mask in masks.items():
                assert mask is None or bool(np.any(mask)), f"slot {slot} may draw nothing"
                self.allowed[slot] = mask

    def step(self, parts: Sequence[SlotPart], alternatives: bool = True) -> Callable[[], Stepped]:
        with self._calling():
            self._check(parts)
            ids, drafts = [], []
            for part in parts:
                made: list[int] = []
                for turn in range(part.turns):
                    one = part._replace(start=part.start + turn, turns=1)
                    self._write(one)
                    made += self._draw(one) if part.draws else []
                ids += made
                drafts.append(tuple(made[:-1]) if part.turns > 1 else part.drafts)
            drawn = self._report(ids)
            if not alternatives:
                drawn.top_ids[:] = drawn.top_logprobs[:] = 0
            scores = (None if p.targets is None else self._report(p.targets) for p in parts)
            rows = sum(part.rows for part in parts)
            stepped = Stepped(drawn, tuple(scores), rows * parts[0].turns, tuple(drafts))

        def wait() -> Stepped:
            self.gate.wait()
            if self.latency:
                time.sleep(self.latency)
            return stepped

        return wait

    def alone(
        self, prompt: Sequence[int], tokens: int, seed: int = 0, allowed: Allowed | None = None
    ) -> list[int]:
        """What a request gets if there is no other; `allowed` says what, by the drawn tokens."""
        known: list[int] = []
        for token in prompt:
            known.append(key_value(known[-1] if known else 0, token))
        seen, counted, drawn = set(prompt), Counter[int](), list[int]()
        for _ in range(tokens):
            token = self._next(np.asarray(known), seed, seen, counted)
            mask = allowed(drawn) if allowed else None
            drawn.append(chosen(token, Sampling(), mask, self.limits.vocab_size))
            seen.add(drawn[-1])
            counted[drawn[-1]] += 1
            known.append(key_value(known[-1], drawn[-1]))
        return drawn

    def _check(self, parts: Sequence[SlotPart]) -> None:
        limits = self.limits
        assert 0 < len(parts) == len({part.slot for part in parts}), "slots of the parts"
        rows: Counter[int] = Counter()
        drawn: Counter[int] = Counter()
        written: Counter[tuple[int, int]] = Counter()
        for part in parts:
            group, count = self._group(part), part.rows
            assert not part.guesses, "it makes none"
            drawn[group] += part.drawn // part.turns
            assert part.turns == parts[0].turns, "turns"
            assert part.turns == 1 or (part.tokens is None and not part.drafts), "turns of a chunk"
            assert not part.drafts or (part.draws and part.tokens is None), "drafts of a chunk"
            end = part.start + count + part.turns - 1
            pages = part.pages
            rows[group] += count
            assert 0 <= part.slot < limits.slots, f"slot {part.slot}"
            assert count > 0 and part.start >= 0 and end <= limits.max_length, f"{part}"
            assert len(pages) == len(set(pages)), "a page is there twice"
            assert len(pages) * limits.page >= end, f"{len(pages)} pages for {end} positions"
            assert all(0 <= page < limits.pages for page in pages), f"pages {pages}"
            assert part.targets is None or len(part.targets) == count, "targets do not fit"
            first, last = part.start // limits.page, (end - 1) // limits.page
            written.update((group, page) for page in pages[first : last + 1])
        assert max(rows.values()) <= limits.rows[-1], f"rows {rows}"
        assert max(written.values()) == 1, "two parts write one page"
        assert max(drawn.values(), default=0) <= limits.slots // limits.groups, f"draws {drawn}"
        self.run += rows.total()

    def _write(self, part: SlotPart) -> None:
        tokens = part.tokens
        if tokens is None:
            latest = self.latest[part.slot]
            assert latest is not None, f"slot {part.slot} has not drawn"
            tokens = (latest, *part.drafts)
        before = self._read(part, part.start)
        known = int(before[-1]) if part.start else 0
        pool, size = self.pools[self._group(part)], self.limits.page
        for position, token in enumerate(tokens, part.start):
            assert 0 <= token < self.limits.vocab_size, f"id {token}"
            known = key_value(known, token)
            pool[part.pages[position // size], position % size] = known

    def _read(self, part: SlotPart, count: int) -> Any:
        """What the pages of a slot say of its first `count` positions."""
        known = self.pools[self._group(part)][list(part.pages)].reshape(-1)[:count]
        assert (known != EMPTY).all(), "a position was never written"
        return known

    def _draw(self, part: SlotPart) -> list[int]:
        """What is drawn behind the latest token and behind drafts; wrong ones leave no trace."""
        slot, sampling = part.slot, self.sampling[part.slot]
        assert sampling is not None, f"slot {slot} has not begun"
        end, count = part.start + part.rows, 1 + len(part.drafts)
        found: list[int] = []
        seen, counted, is_right = self.seen[slot].copy(), self.counted[slot].copy(), True
        for i in range(count):
            known = self._read(part, end - count + 1 + i)
            token = self._next(known, sampling.seed, seen, counted)
            token = chosen(token, sampling, self.allowed[slot], self.limits.vocab_size)
            found.append(token)
            if is_right:
                self.latest[slot] = token
                self.seen[slot].add(token)
                self.counted[slot][token] += 1
                self.drawn += 1
            if i < len(part.drafts):
                is_right &= token == part.drafts[i]
                seen.add(part.drafts[i])
                counted[part.drafts[i]] += 1
        return found

    def _next(self, known: Any, seed: int, seen: set[int], counted: Counter[int]) -> int:
        drawn = [hash(frozenset(seen)), hash(frozenset(counted.items()))]
        digest = zlib.crc32(np.asarray([seed, *drawn], np.int64).tobytes())
        digest = zlib.crc32(known.astype(np.int64).tobytes(), digest)
        return self.alphabet[digest % len(self.alphabet)]

    def _report(self, ids: Any) -> Tokens:
        ids = np.asarray(ids, np.int32)
        tops = (ids[..., None] + np.arange(self.limits.top_logprobs)) % self.limits.vocab_size
        top_logprobs = np.broadcast_to(-0.5 - np.arange(self.limits.top_logprobs), tops.shape)
        return Tokens(
            ids,
            np.full(ids.shape, -0.5, np.float32),
            tops.astype(np.int32),
            top_logprobs.astype(np.float32),
        )

    def _group(self, part: SlotPart) -> int:
        return part.slot // (self.limits.slots // self.limits.groups)

    def _calling(self) -> threading.Lock:
        assert not self._busy.locked(), "two calls at once"
        self.calls += 1
        if self.fail_after is not None and self.calls > self.fail_after:
            raise RuntimeError("the device is gone")
        return self._busy
