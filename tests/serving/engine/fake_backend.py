"""A backend without a model, which holds its caller to the contract of serving/engine/backend.py.

The next token is a hash of all tokens before it and of the seed, so a slot that holds anything but
what it should shows at once. Slots keep real lists of tokens; positions, lengths, sizes of chunks
and what is active are checked in every call.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from serving.engine.backend import Limits, Prefilled, Sampling, Tokens
from tests.waiting import PATIENCE

LIMITS = Limits(
    slots=4, max_length=64, chunks=(4, 8), decode_steps=10, top_logprobs=5, vocab_size=256
)

T = TypeVar("T")


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


def next_token(tokens: Sequence[int], seed: int, vocab_size: int, letters: bool = False) -> int:
    """The token after these; a lower-case letter or a space if `letters`."""
    digest = zlib.crc32(np.asarray([seed, *tokens], np.int64).tobytes())
    if letters:
        return b"abcdefghijklmnopqrstuvwxyz      "[digest % 32]
    return digest % vocab_size


class Mistake(AssertionError):
    """The contract was broken."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Mistake(text)


class FakeBackend:
    """Deterministic; results take `latency` seconds; after `fail_after` calls it raises.

    While its gate is closed results do not come.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        *,
        latency: float = 0.0,
        letters: bool = True,
        fail_after: int | None = None,
    ) -> None:
        self.limits = limits
        self.latency = latency
        self.letters = letters
        self.fail_after = fail_after
        self.compile_total = 3
        self.info: dict[str, Any] = {
            "mesh": "fake", "device_kind": "fake", "bandwidth": 1e9,
            "read_weight_bytes": 1_000_000, "cache_bytes": 256_000,
        }  # fmt: skip
        self.calls = 0
        self.gate = Gate()
        self.prefilled = 0
        self.held: list[list[int]] = [[] for _ in range(limits.slots)]
        self.latest: list[int | None] = [None] * limits.slots
        self.sampling: list[Sampling | None] = [None] * limits.slots
        self._busy = threading.Lock()

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int,
        *,
        sampling: Sampling | None = None,
        targets: Sequence[int] | None = None,
    ) -> Callable[[], Prefilled]:
        with self._calling():
            chunk = tokens[start:]
            require(0 <= slot < self.limits.slots, f"slot {slot}")
            require(1 <= len(chunk) <= self.limits.chunks[-1], f"a chunk of {len(chunk)}")
            require(0 <= start <= len(self.held[slot]), f"{start} beyond {len(self.held[slot])}")
            require(len(tokens) <= self.limits.max_length, "beyond the end")
            require(list(tokens[:start]) == self.held[slot][:start], "another beginning is there")
            require(all(0 <= t < self.limits.vocab_size for t in tokens), f"ids {tokens}")
            require(targets is None or len(targets) == len(chunk), "targets do not fit")
            self.prefilled += len(chunk)
            self.held[slot][start:] = chunk
            self.latest[slot] = self.sampling[slot] = None
            first = None
            if sampling is not None:
                self.sampling[slot] = sampling
                first = self._report([self._draw(slot)])
            scores = None if targets is None else self._report(targets)
            return self._later(Prefilled(first, scores))

    def decode(
        self, active: Sequence[bool], steps: int, alternatives: bool = True
    ) -> Callable[[], Tokens]:
        with self._calling():
            require(len(active) == self.limits.slots and any(active), f"active {active}")
            require(1 <= steps <= self.limits.decode_steps, f"{steps} steps")
            ids = np.full((steps, self.limits.slots), -1, np.int32)
            for step in range(steps):
                for slot in np.flatnonzero(active):
                    latest = self.latest[slot]
                    assert latest is not None, f"slot {slot} was never filled"
                    self.held[slot].append(latest)
                    require(len(self.held[slot]) <= self.limits.max_length, f"slot {slot} is full")
                    ids[step, slot] = self._draw(int(slot))
            made = self._report(ids)
            if not alternatives:
                made.top_ids[:] = made.top_logprobs[:] = 0
            return self._later(made)

    def copy(self, source: int, target: int, length: int) -> None:
        with self._calling():
            require(source != target, "a copy onto itself")
            require(1 <= length <= len(self.held[source]), f"{length} of {len(self.held[source])}")
            self.held[target] = self.held[source][:length]
            self.latest[target] = self.sampling[target] = None

    def alone(self, prompt: Sequence[int], tokens: int, seed: int = 0) -> list[int]:
        """What a request gets if there is no other."""
        held = list(prompt)
        for _ in range(tokens):
            held.append(next_token(held, seed, self.limits.vocab_size, self.letters))
        return held[len(prompt) :]

    def _draw(self, slot: int) -> int:
        sampling = self.sampling[slot]
        assert sampling is not None, f"slot {slot} has no sampling"
        token = next_token(self.held[slot], sampling.seed, self.limits.vocab_size, self.letters)
        self.latest[slot] = token
        return token

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

    def _calling(self) -> threading.Lock:
        """One call at a time."""
        require(not self._busy.locked(), "two calls at once")
        self.calls += 1
        if self.fail_after is not None and self.calls > self.fail_after:
            raise RuntimeError("the device is gone")
        return self._busy

    def _later(self, made: T) -> Callable[[], T]:
        def wait() -> T:
            self.gate.wait()
            if self.latency:
                time.sleep(self.latency)
            return made

        return wait
