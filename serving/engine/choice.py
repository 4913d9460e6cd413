"""Turns the tokens of one completion into what its reader gets: text, log-probabilities, its end.

Text is shown as soon as it is certain: when its characters are whole, and when it can no longer be
the beginning of a stop string. With the stop string "END" and the tokens " wor", "ld E", "NDS":

    take(" wor")    shows " wor"
    take("ld E")    shows "ld "; "E" might begin the stop string
    take("NDS")     shows nothing and finishes
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.serving.engine.actions import Finish, Job
from spmd.serving.engine.backend import Tokens
from spmd.serving.engine.text import Decode, Detokenizer, StopMatcher, TokenTexts
from spmd.serving.engine.thought import ThoughtSplitter


class Token(NamedTuple):
    """A token with its log-probability."""

    # the token's part of the text. If a character is made of several tokens, the last of them has
    # its text and the others have none.
    text: str
    offset: int  # where `text` begins in the completion, or, for a prompt's token, in the prompt
    logprob: float | None  # None for the first token of a prompt, as nothing comes before it
    # (text, log-probability) of the likeliest tokens, likeliest first
    top: tuple[tuple[str, float], ...]


class Delta(NamedTuple):
    """A new part of a completion."""

    choice: int  # index of the completion among those of its request
    text: str  # follows the texts of the deltas before
    tokens: tuple[Token, ...]  # the tokens of that text, if log-probabilities were asked for
    generated: int  # number of tokens drawn so far, whether shown or not
    finish: Finish | None  # why the completion ended, with its last delta; else None
    # with the first delta, if asked for: log-probabilities of the prompt's tokens, for
    # `read_scores`
    scores: Tokens | None = None
    # if asked for: the ids drawn since the delta before, whether their text is shown or not
    ids: tuple[int, ...] = ()
    stop: str = ""  # the stop string that ended the completion, if one did

    def joined(self, later: "Delta") -> "Delta":
        """This delta and the next one of the same completion, as one."""
        return later._replace(
            text=self.text + later.text,
            tokens=self.tokens + later.tokens,
            scores=self.scores,
            ids=self.ids + later.ids,
        )


NAN = "the model's logits are not numbers (NaN): its weights may be damaged"


class NotFinite(RuntimeError):
    """The model computed NaN."""


class CompletionText:
    """The text of one completion, so far.

    Args:
      index: of the completion, among those of its request.
      decode: turns token ids into text.
      pieces: the text of single tokens.

    Attributes:
      generated: number of tokens drawn so far.
    """

    def __init__(self, index: int, job: Job, decode: Decode, pieces: TokenTexts) -> None:
        self.index = index
        self.job = job
        self.generated = 0
        self._pieces = pieces
        self._detokenizer = Detokenizer(decode, job.prompt)
        self._matcher = StopMatcher(job.stops)
        thought = job.thought if job.stops else None
        self._splitter = None if thought is None else ThoughtSplitter(thought)
        # Lengths in characters: the text of all tokens so far, and the part that was shown. What
        # is between them waits in the matcher, and its tokens wait in `_tokens`.
        self._length = 0
        self._shown = 0
        self._tokens: list[Token] = []
        self._scores: list[Tokens] = []
        self._scored = 0

    def take_scores(self, start: int, scores: Tokens) -> None:
        """Keeps the scores of a chunk of the prompt until the first delta.

        Args:
          start: where the chunk begins. A request that lost its pages has its prompt run again, so
            some of the scores may be known.
          scores: arrays (N, ...).
        """
        known = self._scored - start
        if known < len(scores.ids):
            parts: Any = (values[known:] for values in scores)
            self._scores.append(Tokens(*parts))
            self._scored = start + len(scores.ids)

    def take(self, drawn: Sequence[tuple[Tokens, int]], finish: Finish | None) -> Delta:
        """Makes a delta of the next tokens.

        Args:
          drawn: arrays (N, ...), and which of them the token is, of each; of no token if the
            completion ends without any.
          finish: why it ends with these tokens; None if the scheduler knows of no end.

        Returns:
          The delta. A stop string ends the completion even if `finish` is None; tokens behind it
          are left alone.

        Raises:
          NotFinite: a log-probability is NaN.
        """
        scores = None
        if self._scores:  # of all chunks
            scores = Tokens(*(np.concatenate(parts) for parts in zip(*self._scores, strict=True)))
            self._scores = []
            # The last row scores a made-up target: nothing follows the prompt's last token.
            if np.isnan(scores.logprobs[:-1]).any():
                raise NotFinite(NAN)
        before, job = self.generated, self.job
        if any(math.isnan(arrays.logprobs[row]) for arrays, row in drawn):
            raise NotFinite(NAN)
        texts = drawn[:-1] if finish == "stop" else drawn  # the last one's is a mark like </s>
        text, stopped = "", False
        if job.stops or job.hidden or job.logprobs is not None:
            for arrays, row in texts:
                if not stopped:
                    shown, stopped = self._push(arrays, row)
                    text += shown
        elif texts:
            text = self._detokenizer.push(*(int(arrays.ids[row]) for arrays, row in texts))
            self._length += len(text)
            self.generated += len(texts)
        if stopped:
            finish = "stop"
        elif finish is not None:
            self.generated = before + len(drawn)
            rest, stopped = self._flush()
            text += rest
            finish = "stop" if stopped else finish
        self._shown += len(text)
        tokens = self._release(finish is not None, stopped) if self._tokens else ()
        taken = drawn[: self.generated - before] if job.reports_ids else ()
        ids = tuple(int(arrays.ids[row]) for arrays, row in taken)
        stop = self._matcher.found if stopped else ""
        return Delta(self.index, text, tokens, self.generated, finish, scores, ids, stop)

    def _push(self, drawn: Tokens, i: int) -> tuple[str, bool]:
        """Takes one token: (text that can be shown now, whether a stop string is complete)."""
        self.generated += 1
        token = int(drawn.ids[i])
        piece = "" if token in self.job.hidden else self._detokenizer.push(token)
        if self.job.logprobs is not None:
            self._tokens.append(_token(drawn, i, piece, self._length, self.job, self._pieces))
        self._length += len(piece)
        return self._matched(piece)

    def _matched(self, text: str, ends: bool = False) -> tuple[str, bool]:
        """(what of a text can be shown, whether a stop string is complete)."""
        shown, splitter = "", self._splitter
        if splitter is not None:  # stop strings are looked for in the answer
            parts = [*splitter.push(text), *(splitter.flush() if ends else ())]
            shown = "".join(part for kind, part in parts if kind != "answer")
            text = "".join(part for kind, part in parts if kind == "answer")
        if not ends and self.generated <= self.job.min_tokens:
            return shown + text, False
        more, stopped = self._matcher.push(text)
        return shown + more, stopped

    def _flush(self) -> tuple[str, bool]:
        """The text that was held back, now that no more tokens come."""
        piece = self._detokenizer.flush()
        if piece and self._tokens:
            self._tokens[-1] = self._tokens[-1]._replace(text=self._tokens[-1].text + piece)
        self._length += len(piece)
        text, stopped = self._matched(piece, ends=True)
        return (text, True) if stopped else (text + self._matcher.flush(), False)

    def _release(self, finished: bool, stopped: bool) -> tuple[Token, ...]:
        """Removes and returns the tokens whose text has been shown.

        At a stop string, a token that reaches into it counts as shown if its text begins before.
        """
        shown = self._shown
        if finished:
            out = [token for token in self._tokens if not stopped or token.offset < shown]
            self._tokens = []
            return tuple(out)
        count = sum(token.offset + len(token.text) <= shown for token in self._tokens)
        out, self._tokens = self._tokens[:count], self._tokens[count:]
        return tuple(out)


def read_scores(job: Job, scores: Tokens, decode: Decode, pieces: TokenTexts) -> tuple[Token, ...]:
    """The tokens of a prompt with their log-probabilities.

    It decodes every token of the prompt and every alternative, so it is not for the engine's
    thread: a long prompt would delay all other requests.

    Args:
      scores: of the prompt's tokens, from a delta.
    """
    detokenizer, offset, tokens = Detokenizer(decode), 0, list[Token]()
    last = len(job.prompt) - 1
    for i, token in enumerate(job.prompt):
        text = detokenizer.push(token)
        text += detokenizer.flush() if i == last else ""
        first = Token(text, offset, None, ())
        # Row i - 1 was computed behind token i - 1, and has the log-probability of token i.
        tokens.append(_token(scores, i - 1, text, offset, job, pieces) if i else first)
        offset += len(text)
    return tuple(tokens)


def _token(tokens: Tokens, i: int, text: str, offset: int, job: Job, pieces: TokenTexts) -> Token:
    count = job.logprobs or 0
    ids: Sequence[int] = tokens.top_ids[i][:count].tolist()
    logprobs: Sequence[float] = tokens.top_logprobs[i][:count].tolist()
    top = tuple((pieces[t], p) for t, p in zip(ids, logprobs, strict=True))
    return Token(text, offset, float(tokens.logprobs[i]), top)
