"""Speculative decoding by a draft model: a smaller model guesses, the model tries the guesses.

It runs in the same slots, and its pool has the same pages, so that prefixes are shared in both. It
runs only what it needs to guess; where that is more than a step takes it guesses nothing yet. A
slot at position 9, whose draft model has run 0 to 5, wants three guesses:

    draft model: tokens 6 7 8 9, draws a     its latest token stays on the device
                 row 10, draws b
                 row 11, draws c
    model:       rows 9 10 11 12 are the latest token, a, b, c

It draws with the request's own parameters and seed, so with the model's noise at this position.
Then both draw the same token with a probability of at least (1 - d) / (1 + d), where d is the
distance of their distributions in total variation (Daliri, Musco, Suresh 2024). What the model
draws is what it would draw without guesses.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spmd.serving.engine.backend import Backend, Limits, Sampling, SlotPart, Stepped, Words

HOST_SECONDS = 0.001
"""A step takes about so long, however small the model is."""


@dataclasses.dataclass
class _Slot:
    sampling: Sampling
    prompt: int  # so many tokens stand before the first drawn one
    mask: Words | None = None
    is_begun: bool = False  # whether the draft model knows all this


class DraftedBackend:
    """A `Backend` with a draft model.

    Args:
      model: what draws.
      draft: what guesses; it has as many groups, slots, pages and token ids, its pages are as
        large, and its sequences as long.
    """

    def __init__(self, model: Backend, draft: Backend) -> None:
        # Both read their weights in each step.
        bandwidth = model.info.get("bandwidth")
        least = HOST_SECONDS * bandwidth if bandwidth else 1
        read = [max(one.info.get("read_weight_bytes", 0), least) for one in (model, draft)]
        self.limits: Limits = dataclasses.replace(model.limits, draft_cost=read[1] / read[0])
        self.info = model.info
        self._model, self._draft = model, draft
        self._slots: dict[int, _Slot] = {}
        # (A, N): so many positions of each page the draft model has run, of the tokens there now.
        self._run = np.zeros((self.limits.groups, self.limits.pages), np.int32)

    @property
    def seconds(self) -> Mapping[int, float]:
        """See `Backend.seconds`: the model's."""
        return self._model.seconds

    @property
    def turns(self) -> Mapping[int, int]:
        """See `Backend.turns`: guesses take their place."""
        return {}

    @property
    def budget(self) -> int:
        """See `Backend.budget`: the model's."""
        return self._model.budget

    @property
    def compile_total(self) -> int:
        """How many programs have been compiled: the model's count has all of the process."""
        return self._model.compile_total

    def begin(
        self, slot: int, sampling: Sampling, seen: Sequence[int], drawn: Sequence[int] = ()
    ) -> None:
        """See `Backend.begin`."""
        self._model.begin(slot, sampling, seen, drawn)
        self._slots[slot] = _Slot(sampling, len(seen) - len(drawn))

    def allow(self, masks: Mapping[int, Words | None]) -> None:
        """See `Backend.allow`."""
        self._model.allow(masks)
        for slot, mask in masks.items():
            self._slots[slot].mask, self._slots[slot].is_begun = mask, False

    def step(self, parts: Sequence[SlotPart], alternatives: bool = True) -> Callable[[], Stepped]:
        """See `Backend.step`; waits for the draft model's guesses."""
        page = self.limits.page
        for part in parts:  # who begins a page has other tokens there than who had it before
            first, last = -(-part.start // page), -(-(part.start + part.rows) // page)
            self._run[self._group(part), list(part.pages[first:last])] = 0
        drafts = self._guess([part for part in parts if part.guesses])
        parts = [
            p._replace(drafts=drafts.get(p.slot, ()), guesses=0, sequence=()) if p.guesses else p
            for p in parts
        ]
        return self._model.step(parts, alternatives)

    def _guess(self, parts: Sequence[SlotPart]) -> Mapping[int, tuple[int, ...]]:
        """Slot -> drafts, of those whose tokens the draft model has all run with this."""
        # The shortest come first; who is behind still draws nothing. Drafts that were right are
        # run once more, in rows to spare, so that nobody has to know which ones were.
        room, page = [self._draft.budget] * self.limits.groups, self.limits.page
        chunks = []
        for part in sorted(parts, key=lambda part: part.start - self._has_run(part)):
            group, start = self._group(part), self._has_run(part)
            end = min(part.start + 1, start + room[group])
            if start == end:
                continue
            room[group] -= end - start
            tokens = tuple(part.sequence[start:end])
            chunks.append(SlotPart(part.slot, start, tokens, part.pages, end > part.start))
            # Whoever shares these pages need not run them again, not even in this step.
            for i in range(start // page, -(-end // page)):
                self._run[group, part.pages[i]] = min(page, end - i * page)
        if not chunks:
            return {}
        wanted = {part.slot: part for part in parts}
        drawing = [wanted[chunk.slot] for chunk in chunks if chunk.draws]
        self._set_up(drawing)
        calls = [(drawing, self._draft.step(chunks, False))]
        for count in range(1, max((part.guesses for part in drawing), default=0)):
            some = [part for part in drawing if part.guesses > count]
            rows = [SlotPart(p.slot, p.start + count, None, p.pages, draws=True) for p in some]
            calls.append((some, self._draft.step(rows, False)))
        drafts: dict[int, tuple[int, ...]] = {part.slot: () for part in drawing}
        for some, results in calls if drawing else ():  # all have begun before one is waited for
            for part, token in zip(some, results().drawn.ids.tolist(), strict=True):
                drafts[part.slot] += (token,)
        return drafts

    def _has_run(self, part: SlotPart) -> int:
        """How many tokens of a slot the draft model has run, the latest one never among them."""
        page = self.limits.page
        run: list[int] = [*self._run[self._group(part), list(part.pages)].tolist(), 0]
        full = next(i for i, count in enumerate(run) if count < page)
        return min(part.start, full * page + run[full])

    def _set_up(self, parts: Sequence[SlotPart]) -> None:
        """Tells the draft model how the tokens of these slots are drawn, if it does not know."""
        masks = {}
        for part in parts:
            slot, tokens = self._slots[part.slot], part.sequence
            if slot.is_begun:
                continue
            how = slot.sampling
            self._draft.begin(part.slot, how, tokens, tokens[slot.prompt :])
            # If tokens that were drawn count it is told anew: it takes its wrong guesses for some.
            penalties = (how.frequency_penalty, how.presence_penalty, how.repetition_penalty)
            slot.is_begun = penalties == (0, 0, 1)
            if slot.mask is not None:
                masks[part.slot] = slot.mask
        if masks:
            self._draft.allow(masks)

    def _group(self, part: SlotPart) -> int:
        return part.slot // (self.limits.slots // self.limits.groups)
