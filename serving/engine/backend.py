"""What the engine asks of a model: steps over rows of many slots, with keys and values in pages.

The engine and the scheduler do not know jax; a backend does not know requests. A slot holds one
sequence. The keys and values of its tokens, at positions 0, 1, ..., lie in pages that the caller
chooses: position t in page `pages[t // limits.page]` of the slot's group. Two slots of a group may
have pages in common, as far as their tokens are the same.

Calls are asynchronous. A call begins its work and returns a function; calling that function waits
until the work is done and gives its results. Work is done in the order of the calls:

    backend.begin(0, sampling, seen=prompt)
    first = backend.step([Part(0, 0, prompt, pages, draws=True)])
    # Begun before the first token is known:
    second = backend.step([Part(0, len(prompt), None, pages, draws=True)])
    tokens = [*first().drawn.ids, *second().drawn.ids]
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
"""A mask of tokens (`words(V)` of models/sampling.py): bit i % 32 of word i // 32 is token i's."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The sizes for which a backend was compiled."""

    slots: int  # how many sequences run together, over all groups
    max_length: int  # the most tokens of a sequence, prompt and completion together
    # numbers of rows of a group for which a step is compiled, ascending; a step has at most the
    # last of them
    rows: tuple[int, ...]
    # slots and pages are split among so many groups: slot i is in group `i // (slots // groups)`
    groups: int
    page: int  # positions of a page
    pages: int  # of a group
    top_logprobs: int  # how many of the likeliest tokens are reported beside each one
    vocab_size: int  # number of token ids
    drafts: int = 0  # guesses of next tokens that a step can try for one slot
    turns: int = 1  # how many a call may have in which all rows decode
    adapters: int = 0  # how many there is room for
    # by how many steps one more guess of the backend's own delays a step; None: it makes none
    draft_cost: float | None = None

    @property
    def longest(self) -> int:
        """The most tokens that a sequence can have: a small pool holds fewer than `max_length`."""
        return min(self.max_length, self.pages * self.page)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the logits; what is listed first is applied first."""

    temperature: float = 1.0  # logits are divided by it. 0 takes the likeliest token.
    top_k: int = 0  # only the k likeliest tokens are kept; 0 keeps all
    # only the likeliest tokens are kept, as few as reach this sum of probabilities (Holtzman et al.
    # 2019); 1 keeps all.
    top_p: float = 1.0
    # only tokens are kept that have at least this share of the likeliest one's probability; 0 keeps
    # all
    min_p: float = 0.0
    # for tokens that occur in the sequence, prompt included, positive logits are divided by it and
    # negative ones multiplied (Keskar et al. 2019). 1 changes nothing.
    repetition_penalty: float = 1.0
    # subtracted from a token's logit once for each time that it was drawn; occurrences in the
    # prompt do not count. 0 changes nothing.
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0  # subtracted once from the logit of every token that was drawn
    # in [0, 2**32). The seed and the token's position decide the draw, so that a request with a
    # seed repeats exactly.
    seed: int = 0
    # (token, what is added to its logit), of tokens that differ; applied before all
    logit_bias: tuple[tuple[int, float], ...] = ()


class Tokens(NamedTuple):
    """Tokens with their log-probabilities.

    These are the model's own: log-softmax of the logits before penalties, temperature and filters.
    """

    ids: Ints  # (N, ...) token ids
    logprobs: Floats  # (N, ...) the log-probability of each
    top_ids: Ints  # (N, ..., P) the P = `Limits.top_logprobs` likeliest tokens, likeliest first
    top_logprobs: Floats  # (N, ..., P) the log-probabilities of these


class SlotPart(NamedTuple):
    """What a step does in one slot: a chunk of its prompt, or one row that decodes."""

    slot: int  # over all groups
    start: int  # the position of its first row
    # a chunk's ids, a row each; None for one row, of the slot's latest drawn token, which a call
    # that is under way may still have to draw
    tokens: tuple[int, ...] | None
    # of the slot in order, numbered within its group, up to that of its last row at least
    pages: tuple[int, ...]
    # whether a token is drawn behind its last row; behind each, if there are drafts
    draws: bool
    # to have scores: for each row the token behind it. Behind a prompt's last token there is none;
    # any id will do.
    targets: tuple[int, ...] | None = None
    # guesses of the tokens behind the latest drawn one, a row each. What is drawn behind a row
    # counts if it was guessed right up to there; it is what would be drawn without guesses.
    drafts: tuple[int, ...] = ()
    # in place of `drafts`: so many at most the backend is to guess itself, behind the sequence's
    # tokens up to the latest drawn one
    guesses: int = 0
    sequence: Sequence[int] = ()
    # how many tokens one that decodes draws, one behind the other; all parts of a step the same
    turns: int = 1
    adapter: int = -1  # the place of the one that its rows are run with; -1: with none

    @property
    def rows(self) -> int:
        """How many rows it has; fewer if the backend guesses fewer tokens than it may."""
        if self.tokens is not None:
            return len(self.tokens)
        return 1 + (self.guesses or len(self.drafts))

    @property
    def drawn(self) -> int:
        """How many tokens are drawn: one behind each draft and one more, or one in each turn."""
        return self.turns + (self.guesses or len(self.drafts)) if self.draws else 0


class Stepped(NamedTuple):
    """The results of a step."""

    # the drawn tokens, in the order of parts: one for each that draws, and for each of its drafts
    drawn: Tokens
    # for each part None, or its targets with the log-probabilities that the model gives them, one
    # for each row
    scores: tuple[Tokens | None, ...]
    rows: int  # that the devices ran for it: those of all parts, and padding
    # for each part the drafts that were tried: its own, those that the backend guessed, or all but
    # the last of those that its turns drew
    drafts: tuple[tuple[int, ...], ...]


class Backend(Protocol):
    """A model with slots for sequences."""

    limits: Limits  # the sizes for which it was compiled
    # facts about it for people and metrics: the mesh, the device kind, the bytes that a step reads,
    # the devices' bandwidth
    info: dict[str, Any]

    @property
    def seconds(self) -> Mapping[int, float]:
        """What steps are predicted to take, by rows of a group, of all sizes that there are by now.

        Empty where nothing is predicted; where sizes are added, it is another mapping.
        """

    @property
    def turns(self) -> Mapping[int, int]:
        """How many turns a step of one row of each slot may have, by rows of a group."""

    @property
    def budget(self) -> int:
        """Rows of a group in one step beside which decoding slots do not wait long for it."""

    @property
    def compile_total(self) -> int:
        """How many programs have been compiled; it stays the same once all functions are there."""

    def begin(
        self, slot: int, sampling: Sampling, seen: Sequence[int], drawn: Sequence[int] = ()
    ) -> None:
        """Begins to set up a slot for another sequence, before any token of it is drawn.

        Args:
          seen: the ids of the sequence so far, those of `drawn` among them.
          drawn: the tokens that were drawn already, for a sequence that is resumed.
        """

    def allow(self, masks: Mapping[int, Words | None]) -> None:
        """Begins to change which tokens some slots may draw, in all steps from now on.

        Log-probabilities are the model's own all the same. `begin` allows a slot all tokens.

        Args:
          masks: slot -> tokens that it may draw, at least one; None is all.
        """

    def step(self, parts: Sequence[SlotPart], alternatives: bool = True) -> Callable[[], Stepped]:
        """Begins one step of the model over the rows of some slots.

        Each row writes its token's key and value, and sees those of its slot's positions up to its
        own, whichever calls wrote them, or whichever part of this step: a prompt may have pages
        that the chunk of another one fills in the same step. No page is written by two parts.

        Args:
          parts: what to do, at least one; of each slot at most one. The rows of a group are at most
            `limits.rows[-1]`, which is no less than a group has slots; it draws at most as many
            tokens as it has slots.
          alternatives: whether the likeliest tokens are wanted beside drawn ones. If not, `top_ids`
            and `top_logprobs` of these mean nothing.

        Returns:
          A function that waits until the step is done and returns its results.
        """
