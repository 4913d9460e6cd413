"""Turns deltas into the JSON of OpenAI's answers: one object, or the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from serving.engine.backend import Tokens
from serving.engine.choice import Delta, Job, Token
from serving.http.jobs import Work
from serving.http.protocol import Ask, ChatAsk, CompletionAsk

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""

Json = dict[str, Any]
ReadScores = Callable[[Job, Tokens], tuple[Token, ...]]


class Answer:
    """The answer to one request: either `chunks` of each delta, or the `whole` of all deltas.

    Args:
      model: the model's name.
      ask: the request.
      work: its prompts and jobs.
      read_scores: makes the tokens of a prompt from its scores.
    """

    def __init__(self, model: str, ask: Ask, work: Work, read_scores: ReadScores) -> None:
        self._ask = ask
        self._work = work
        self._read_scores = read_scores
        self._is_chat = isinstance(ask, ChatAsk)
        name, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", KIND)
        self._head: Json = {
            "id": f"{name}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._generated = [0] * len(work.jobs)
        self._started = [False] * len(work.jobs)

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The chunks of a stream for one delta; none if the delta shows nothing."""
        self._generated[delta.choice] = delta.generated
        delta = self._with_echo(delta)
        if self._is_chat:
            yield from map(self._chunk, self._chat_chunks(delta))
        elif delta.text or delta.tokens or delta.finish:
            logprobs = self._completion_logprobs(delta.tokens)
            yield self._chunk(
                {
                    "index": delta.choice,
                    "text": delta.text,
                    "logprobs": logprobs,
                    "finish_reason": delta.finish,
                }
            )

    def last_chunk(self) -> Json | None:
        """The chunk with the token counts that ends a stream; None if it was not asked for."""
        if not self._ask.include_usage:
            return None
        return {**self._head, **self._kind(), "choices": [], "usage": self._usage()}

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer in one object.

        Args:
          deltas: all deltas of all completions.
        """
        by_choice: list[list[Delta]] = [[] for _ in self._work.jobs]
        for delta in deltas:
            self._generated[delta.choice] = delta.generated
            by_choice[delta.choice].append(self._with_echo(delta))
        choices = []
        for index, mine in enumerate(by_choice):
            text = "".join(delta.text for delta in mine)
            tokens = [token for delta in mine for token in delta.tokens]
            choices.append(self._choice(index, text, tokens, mine[-1].finish))
        return {**self._head, "choices": choices, "usage": self._usage()}

    # -----------------------------------------------------------------------------------------

    def _kind(self) -> Json:
        return {"object": "chat.completion.chunk"} if self._is_chat else {}

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head, **self._kind(), "choices": [choice]}
        if not self._ask.include_usage:
            return chunk
        return {**chunk, "usage": self._usage() if self._ask.usage_always else None}

    def _chat_chunks(self, delta: Delta) -> Iterator[Json]:
        """The role in a chunk of its own, then the text, then the reason of the end."""
        if not self._started[delta.choice]:
            self._started[delta.choice] = True
            yield _chat_choice(delta.choice, {"role": "assistant", "content": ""})
        if delta.text or delta.tokens:
            logprobs = self._chat_logprobs(delta.tokens)
            yield _chat_choice(delta.choice, {"content": delta.text}, logprobs)
        if delta.finish:
            yield {**_chat_choice(delta.choice, {}), "finish_reason": delta.finish}

    def _choice(self, index: int, text: str, tokens: Sequence[Token], finish: str | None) -> Json:
        if not self._is_chat:
            logprobs = self._completion_logprobs(tokens)
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._chat_logprobs(tokens),
            "finish_reason": finish,
        }

    def _with_echo(self, delta: Delta) -> Delta:
        """If the request has `echo`: puts the prompt before the first delta, and moves offsets."""
        if not isinstance(self._ask, CompletionAsk) or not self._ask.echo:
            return delta
        prompt = self._work.prompts[delta.choice // self._ask.n]
        tokens: tuple[Token, ...] = ()
        if delta.scores is not None:
            tokens = self._read_scores(self._work.jobs[delta.choice], delta.scores)
        # The prompt's text begins behind the tokens that were added to it, such as <s>.
        added = sum(len(token.text) for token in tokens[: prompt.added])
        before = [_moved(token, -added) for token in tokens[prompt.added :]]
        behind = [_moved(token, len(prompt.text)) for token in delta.tokens]
        text = delta.text if self._started[delta.choice] else prompt.text + delta.text
        self._started[delta.choice] = True
        return delta._replace(text=text, tokens=(*before, *behind))

    def _completion_logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._ask.logprobs is None:
            return None
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [_number(token.logprob) for token in tokens],
            "tokens": [token.text for token in tokens],
            "top_logprobs": [_top(token) for token in tokens] if self._ask.logprobs else None,
        }

    def _chat_logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._ask.logprobs is None:
            return None
        content = [
            {**_said(token.text, token.logprob), "top_logprobs": [_said(*one) for one in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _usage(self) -> Json:
        prompt = sum(len(prompt.ids) for prompt in self._work.prompts)
        generated = sum(self._generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }


def _moved(token: Token, by: int) -> Token:
    return token._replace(offset=token.offset + by)


KIND = "text_completion"


def _chat_choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def _top(token: Token) -> dict[str, float] | None:
    """The alternatives by text, and the token itself; of equal texts the likelier one counts."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for text, logprob in token.top:
        top.setdefault(text, max(logprob, LEAST_LOGPROB))
    top.setdefault(token.text, max(token.logprob, LEAST_LOGPROB))
    return top


def _said(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": _number(logprob), "bytes": list(text.encode())}
