"""A `Backend` over exported functions: picks each call's bucket, pads inputs, reads results."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from models.sampling import FIELDS
from serving.engine.backend import Backend, Limits, Prefilled, Sampling, Tokens

NEUTRAL = Sampling(temperature=0.0)


class Functions(Protocol):
    """Compiled functions with the weights and the state that they share; a bundle is one.

    Attributes:
      functions: by name, each with `tags`.
      compile_total: how many programs have been compiled.
    """

    @property
    def functions(self) -> Mapping[str, Any]:
        """The functions by name."""

    @property
    def compile_total(self) -> int:
        """How many programs have been compiled."""

    def run(self, name: str, *inputs: Any) -> Any:
        """Calls one function on weights, state and `inputs`; returns its outputs."""


class ModelBackend:
    """The `Backend` of a model whose functions are those of `models.llama.decode.functions`.

    Args:
      programs: the functions.
      limits: the sizes for which they were compiled.
      info: facts about the model for people.
    """

    def __init__(
        self, programs: Functions, limits: Limits, info: Mapping[str, Any] | None = None
    ) -> None:
        self.limits = limits
        self.info = dict(info or {})
        self._programs = programs
        self._names = {
            (tags["kind"], tags.get("chunk", 0), tags.get("length", 0)): name
            for name, tags in ((n, f.tags) for n, f in programs.functions.items())
        }
        self._lengths = sorted({length for kind, _, length in self._names if kind == "decode"})
        # How many tokens each slot holds once all calls that have begun are done.
        self._held = [0] * limits.slots

    @property
    def compile_total(self) -> int:
        """How many programs have been compiled."""
        return self._programs.compile_total

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int,
        *,
        sampling: Sampling | None = None,
        targets: Sequence[int] | None = None,
    ) -> Callable[[], Prefilled]:
        """See `Backend.prefill`."""
        self._check_chunk(slot, len(tokens) - start, start)
        prompt = [int(token) for token in tokens]
        end, chunk = len(prompt), self._bucket(len(tokens) - start)
        # The padded chunk has to fit into the slot. With 64 positions and a bucket of 16, a chunk
        # that starts at 52 is run from 48 on: tokens 48..51 are run a second time.
        first = max(0, min(start, self.limits.max_length - chunk))
        length = self._length(max(end, first + chunk))
        inputs = {
            "slot": np.int32(slot),
            "start": np.int32(first),
            "count": np.int32(end - first),
            "tokens": _padded(prompt[first:], chunk),
            "last": np.bool_(sampling is not None),
            "seen": self._seen(prompt if sampling is not None else ()),
            "sampling": _sampling_inputs(sampling or NEUTRAL),
        }
        if targets is not None:
            inputs["targets"] = _padded([*prompt[first + 1 : start + 1], *targets], chunk)
        kind = "prefill" if targets is None else "score"
        outputs = self._programs.run(self._names[kind, chunk, length], inputs)
        self._held[slot] = end
        drawn = _tokens(outputs["first"])
        scores = None
        if targets is not None:
            scores = _tokens(outputs["scores"], start - first, end - first)

        def results() -> Prefilled:
            # A chunk's token is waited for even if nobody wants it. Otherwise the host would begin
            # all chunks of a long prompt at once, and nothing could be scheduled between them.
            token = drawn()
            return Prefilled(token if sampling is not None else None, scores and scores())

        return results

    def decode(
        self, active: Sequence[bool], steps: int, alternatives: bool = True
    ) -> Callable[[], Tokens]:
        """See `Backend.decode`."""
        limits = self.limits
        taking_part = [slot for slot, is_active in enumerate(active) if is_active]
        longest = max(self._held[slot] for slot in taking_part) + steps
        if not 1 <= steps <= limits.decode_steps or longest > limits.max_length:
            raise ValueError(
                f"decode of {steps} tokens up to position {longest}: at most "
                f"{limits.decode_steps} tokens and {limits.max_length} positions"
            )
        inputs = {
            "active": np.asarray(active, np.bool_),
            "alternatives": np.bool_(alternatives and limits.top_logprobs > 0),
            "steps": np.int32(steps),
        }
        name = self._names["decode", 0, self._length(longest)]
        made = _tokens(self._programs.run(name, inputs), end=steps)
        for slot in taking_part:
            self._held[slot] += steps
        return made

    def copy(self, source: int, target: int, length: int) -> None:
        """See `Backend.copy`."""
        slots = {"source": np.int32(source), "target": np.int32(target)}
        self._programs.run(self._names["copy", 0, self._length(length)], slots)
        self._held[target] = length

    def warm_up(self) -> None:
        """Calls every function once, so that no request pays for what a first call does."""
        limits = self.limits
        for length in self._lengths:
            for chunk in (c for c in limits.chunks if c <= length):
                self._held[0] = start = length - chunk
                for targets in (None, [0] * chunk):
                    self.prefill(0, [0] * length, start, sampling=NEUTRAL, targets=targets)()
            self.copy(0, limits.slots - 1, length)
            self._held = [length - 1] * limits.slots
            self.decode([True] * limits.slots, 1)()
        self._held = [0] * limits.slots

    def _check_chunk(self, slot: int, count: int, start: int) -> None:
        limits = self.limits
        if not 1 <= count <= limits.chunks[-1] or start + count > limits.max_length:
            raise ValueError(
                f"a chunk of {count} tokens at {start}: 1 to {limits.chunks[-1]} tokens within "
                f"{limits.max_length} positions"
            )
        if start > self._held[slot]:
            raise ValueError(f"slot {slot} holds {self._held[slot]} tokens, not {start}")

    def _bucket(self, count: int) -> int:
        chunks = self.limits.chunks
        return chunks[bisect.bisect_left(chunks, count)]

    def _length(self, needed: int) -> int:
        found: int = self._lengths[bisect.bisect_left(self._lengths, needed)]
        return found

    def _seen(self, tokens: Iterable[int]) -> Any:
        seen = np.zeros(self.limits.vocab_size, np.bool_)
        seen[list(tokens)] = True
        return seen


def _padded(tokens: Sequence[int], size: int) -> Any:
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    return padded


def _sampling_inputs(sampling: Sampling) -> dict[str, Any]:
    return {name: np.asarray(getattr(sampling, name), dtype) for name, (dtype, _) in FIELDS.items()}


def _tokens(report: Any, start: int = 0, end: int | None = None) -> Callable[[], Tokens]:
    """Starts to copy rows of a report to the host; returns a function that waits for them."""
    for x in report:
        x.copy_to_host_async()
    return lambda: Tokens(*(np.asarray(x)[start:end] for x in report))


def generate(
    backend: Backend,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling | None = None,
    ends: frozenset[int] = frozenset(),
) -> tuple[list[int], list[float]]:
    """Draws the tokens after one prompt, in slot 0.

    Args:
      backend: the model; nobody else may use it meanwhile.
      prompt: token ids, at least one.
      count: how many tokens to draw.
      sampling: how to draw them; None takes the likeliest.
      ends: ids after which drawing stops. Tokens drawn in the same call, behind such an id, are
        returned as well.

    Returns:
      (tokens, their log-probabilities).
    """
    sampling = sampling or NEUTRAL
    largest = backend.limits.chunks[-1]
    first = None
    for start in range(0, len(prompt), largest):
        part = prompt[: start + largest]
        is_last = len(part) == len(prompt)
        first = backend.prefill(0, part, start, sampling=sampling if is_last else None)().first
    assert first is not None  # a prompt has a last part
    tokens, logprobs = first.ids.tolist(), first.logprobs.tolist()
    active = np.arange(backend.limits.slots) == 0
    while len(tokens) < count and ends.isdisjoint(tokens):
        steps = min(backend.limits.decode_steps, count - len(tokens))
        made = backend.decode(active.tolist(), steps, alternatives=False)()
        tokens += made.ids[:, 0].tolist()
        logprobs += made.logprobs[:, 0].tolist()
    return tokens, logprobs
