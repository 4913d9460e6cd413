"""One completion on its way from tokens to what its reader gets: text, log-probabilities, end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from serving.engine.actions import Finish
from serving.engine.backend import Floats, Sampling, Tokens
from serving.engine.text import Decode, Detokenizer, Pieces, StopMatcher


@dataclasses.dataclass(frozen=True)
class Job:
    """A completion that is asked for.

    Attributes:
      prompt: ids, at least one.
      max_tokens: tokens to draw at most.
      sampling: how.
      stop_ids: ids that end it; their text is not shown.
      stops: strings that end it; they are not shown either.
      logprobs: alternatives to report with each token; None for no log-probabilities at all.
      score_prompt: report those of the prompt's tokens too.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    score_prompt: bool = False


class Token(NamedTuple):
    """A token with what the model says of it.

    Attributes:
      text: its part of the text; empty for all but the last token of a character.
      offset: where that begins in the completion's text (of a prompt's token: the prompt's text).
      logprob: None for the first token of a prompt, which follows on nothing.
      top: the likeliest alternatives, likeliest first, as texts with their log-probabilities.
    """

    text: str
    offset: int
    logprob: float | None
    top: tuple[tuple[str, float], ...]


class Delta(NamedTuple):
    """What is new of a completion.

    Attributes:
      choice: which of the completions that were asked for together.
      text: to be shown behind what was shown before.
      tokens: those of that text, if log-probabilities were asked for.
      generated: tokens drawn so far, shown or not.
      finish: why it ended, with the last delta.
      scores: of the prompt's tokens, with the first delta, if asked for: see `read_scores`.
    """

    choice: int
    text: str
    tokens: tuple[Token, ...]
    generated: int
    finish: Finish | None
    scores: Tokens | None = None


class NotFinite(RuntimeError):
    """The model's numbers are not numbers."""


def pick(tokens: Tokens, index: Any) -> Tokens:
    """Some of the tokens: `index` is numpy's, of the leading dims."""
    return Tokens(
        tokens.ids[index],
        tokens.logprobs[index],
        tokens.top_ids[index],
        tokens.top_logprobs[index],
    )


class Choice:
    """What the engine knows of one completion; pure, but for its own state.

    Args:
      index: which of those that were asked for together.
      job: what is asked for.
      decode, pieces: the tokenizer's.
    """

    def __init__(self, index: int, job: Job, decode: Decode, pieces: Pieces) -> None:
        self.index = index
        self.job = job
        self.generated = 0
        self._pieces = pieces
        self._detokenizer = Detokenizer(decode, job.prompt)
        self._matcher = StopMatcher(job.stops)
        self._length = 0  # of the text of all tokens so far
        self._shown = 0  # of what was shown of it
        self._tokens: list[Token] = []  # whose text is not shown yet
        self._scores: list[Tokens] = []

    def take_scores(self, scores: Tokens) -> None:
        """Keep what a chunk of the prompt says of the tokens after its own."""
        self._scores.append(scores)

    def take(self, drawn: Tokens, finish: Finish | None) -> tuple[Delta, int]:
        """Make a delta of tokens.

        Args:
          drawn: (N, ...) tokens, maybe none.
          finish: why the completion ends with them; None if it does not.

        Returns:
          The delta, and how many of the tokens lie behind a stop string. If the delta finishes and
          `finish` was None it is such a string that ended the completion.

        Raises:
          NotFinite: the model gave NaN.
        """
        _check_finite(drawn.logprobs)
        scores = self._take_scores()
        text, stopped, count = "", False, len(drawn.ids)
        for i in range(count):
            piece, stopped = self._push(drawn, i, ends=finish == "stop" and i + 1 == count)
            text += piece
            if stopped:
                finish, count = "stop", i + 1
                break
        if finish is not None and not stopped:
            rest, stopped = self._flush()
            text += rest
            finish = "stop" if stopped else finish
        self._shown += len(text)
        tokens = self._release(finish is not None, stopped)
        delta = Delta(self.index, text, tokens, self.generated, finish, scores)
        return delta, len(drawn.ids) - count

    def _push(self, drawn: Tokens, i: int, ends: bool) -> tuple[str, bool]:
        """Take one token; the text that it lets show, and whether a stop string ends it."""
        self.generated += 1
        if ends:  # its text is a mark like </s>
            return "", False
        piece = self._detokenizer.push(int(drawn.ids[i]))
        if self.job.logprobs is not None:
            self._tokens.append(_token(drawn, i, piece, self._length, self.job, self._pieces))
        self._length += len(piece)
        return self._matcher.push(piece)

    def _flush(self) -> tuple[str, bool]:
        """The text that waited for more."""
        piece = self._detokenizer.flush()
        if piece and self._tokens:
            self._tokens[-1] = self._tokens[-1]._replace(text=self._tokens[-1].text + piece)
        self._length += len(piece)
        text, stopped = self._matcher.push(piece)
        return (text, True) if stopped else (text + self._matcher.flush(), False)

    def _release(self, finished: bool, stopped: bool) -> tuple[Token, ...]:
        """The tokens whose text is shown, or begins to be where a stop string cut it."""
        shown = self._shown
        if finished:
            out = [token for token in self._tokens if not stopped or token.offset < shown]
            self._tokens = []
            return tuple(out)
        count = sum(token.offset + len(token.text) <= shown for token in self._tokens)
        out, self._tokens = self._tokens[:count], self._tokens[count:]
        return tuple(out)

    def _take_scores(self) -> Tokens | None:
        """What the model says of the prompt's tokens, once."""
        if not self._scores:
            return None
        scores = Tokens(*(np.concatenate(parts) for parts in zip(*self._scores, strict=True)))
        self._scores = []
        _check_finite(scores.logprobs[:-1])
        return scores


def read_scores(job: Job, scores: Tokens, decode: Decode, pieces: Pieces) -> tuple[Token, ...]:
    """The tokens of a prompt with what the model says of them; long prompts take a while."""
    detokenizer, offset, tokens = Detokenizer(decode), 0, list[Token]()
    last = len(job.prompt) - 1
    for i, token in enumerate(job.prompt):
        text = detokenizer.push(token)
        text += detokenizer.flush() if i == last else ""
        first = Token(text, offset, None, ())
        # Row i - 1 says what the model thinks of token i.
        tokens.append(_token(scores, i - 1, text, offset, job, pieces) if i else first)
        offset += len(text)
    return tuple(tokens)


def _token(tokens: Tokens, i: int, text: str, offset: int, job: Job, pieces: Pieces) -> Token:
    count = job.logprobs or 0
    ids: Sequence[int] = tokens.top_ids[i][:count].tolist()
    logprobs: Sequence[float] = tokens.top_logprobs[i][:count].tolist()
    top = tuple((pieces[t], p) for t, p in zip(ids, logprobs, strict=True))
    return Token(text, offset, float(tokens.logprobs[i]), top)


def _check_finite(logprobs: Floats) -> None:
    if any(map(math.isnan, logprobs.tolist())):  # mostly one number: numpy would take longer
        raise NotFinite("the model's logits are not numbers (NaN): its weights may be damaged")
