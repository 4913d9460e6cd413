"""Turns deltas into the JSON of OpenAI's answers: one object, or the chunks of a stream.

Log-probabilities are written as OpenAI does for completions and chats, as vLLM does for prompts.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from serving.engine.actions import Finish, Job
from serving.engine.backend import Tokens
from serving.engine.choice import Delta, Token
from serving.http.jobs import Work
from serving.http.protocol import Ask, ChatAsk, CompletionAsk
from serving.http.tools.message import MessageReader

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""

Json = dict[str, Any]


def completion_logprobs(tokens: Sequence[Token], asked: int | None) -> Json | None:
    """Those of a completion's tokens.

    Args:
      asked: for how many alternatives; None for no log-probabilities.
    """
    if asked is None:
        return None
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_top(token) for token in tokens] if asked else None,
    }


def chat_logprobs(tokens: Sequence[Token], asked: int | None) -> Json | None:
    """Those of a chat's tokens; the arguments are those of `completion_logprobs`."""
    if asked is None:
        return None
    content = [
        {**_said(token.text, token.logprob), "top_logprobs": [_said(*one) for one in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    prompt: Sequence[int], scores: Tokens, asked: int, piece: Callable[[int], str]
) -> list[Json | None]:
    """Those of a prompt's tokens, in vLLM's form: by token id.

    Args:
      scores: row i is what the model says of the token behind token i.
      asked: for how many alternatives.
      piece: the text of a token.
    """
    rows: list[Json | None] = [None]  # nothing comes before the first token
    for i, token in enumerate(prompt[1:]):
        top: list[int] = scores.top_ids[i].tolist()
        own = (token, float(scores.logprobs[i]), top.index(token) + 1 if token in top else None)
        likeliest: list[float] = scores.top_logprobs[i].tolist()
        others = [(one, likeliest[at], at + 1) for at, one in enumerate(top[:asked])]
        row: Json = {}
        for one, logprob, rank in (own, *others):
            row[str(one)] = {
                "logprob": _number(logprob), "rank": rank, "decoded_token": piece(one),
            }  # fmt: skip
        rows.append(row)
    return rows


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


class Texts(Protocol):
    """What an answer needs of the engine."""

    def read_scores(self, job: Job, scores: Tokens) -> tuple[Token, ...]:
        """The tokens of a prompt, made of its scores."""

    def piece(self, token: int) -> str:
        """The text of a token."""


class Answer:
    """The answer to one request: either `chunks` of each delta, or the `whole` of all deltas.

    Args:
      work: its prompts and jobs.
      engine: reads the scores of prompts, and knows the texts of tokens.
    """

    def __init__(self, model: str, ask: Ask, work: Work, engine: Texts) -> None:
        self._ask = ask
        self._work = work
        self._engine = engine
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
        self._readers = _readers(ask, work)

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The chunks of a stream for one delta; none if the delta shows nothing."""
        self._generated[delta.choice] = delta.generated
        delta = self._with_echo(delta)
        if self._is_chat:
            yield from map(self._chunk, self._chat_chunks(delta))
        elif delta.text or delta.tokens or delta.finish:
            logprobs = completion_logprobs(delta.tokens, self._ask.logprobs)
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
        """The answer in one object."""
        by_choice: list[list[Delta]] = [[] for _ in self._work.jobs]
        for delta in deltas:
            self._generated[delta.choice] = delta.generated
            by_choice[delta.choice].append(self._with_echo(delta))
        choices = []
        for index, mine in enumerate(by_choice):
            text = "".join(delta.text for delta in mine)
            tokens = [token for delta in mine for token in delta.tokens]
            choices.append(self._choice(index, text, tokens, mine[-1].finish))
        answer = {**self._head, "choices": choices, "usage": self._usage()}
        return answer if self._ask.prompt_logprobs is None else self._with_prompts(answer, deltas)

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
        reader, finish = self._readers[delta.choice], delta.finish
        logprobs = chat_logprobs(delta.tokens, self._ask.logprobs)
        parts = [{"content": delta.text}] if delta.text or delta.tokens else []
        if reader is not None:
            # Tokens of which nothing is to be shown have their log-probabilities all the same.
            parts = [*reader.deltas(delta.text, finish)] or ([{}] if delta.tokens else [])
        for i, part in enumerate(parts):
            yield _chat_choice(delta.choice, part, None if i else logprobs)
        if finish:
            reason = finish if reader is None else reader.finish(finish)
            yield {**_chat_choice(delta.choice, {}), "finish_reason": reason}

    def _choice(
        self, index: int, text: str, tokens: Sequence[Token], finish: Finish | None
    ) -> Json:
        asked = self._ask.logprobs
        if not self._is_chat:
            logprobs = completion_logprobs(tokens, asked)
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        reader = self._readers[index]
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if reader is not None:
            message = reader.message(text, finish)
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(tokens, asked),
            "finish_reason": finish if reader is None else reader.finish(finish),
        }

    def _with_prompts(self, answer: Json, deltas: Sequence[Delta]) -> Json:
        """The answer with log-probabilities of its prompts; that of a chat is beside `choices`."""
        made: dict[int, Any] = {}
        for delta in deltas:
            if delta.scores is not None:
                number = delta.choice // self._ask.n
                prompt, asked = self._work.prompts[number], self._ask.prompt_logprobs or 0
                made[number] = prompt_logprobs(prompt.ids, delta.scores, asked, self._engine.piece)
        if self._is_chat:
            return {**answer, "prompt_logprobs": made[0]}
        for index, choice in enumerate(answer["choices"]):
            choice["prompt_logprobs"] = made[index // self._ask.n]
        return answer

    def _with_echo(self, delta: Delta) -> Delta:
        """If the request has `echo`: puts the prompt before the first delta, and moves offsets."""
        if not isinstance(self._ask, CompletionAsk) or not self._ask.echo:
            return delta
        prompt = self._work.prompts[delta.choice // self._ask.n]
        tokens: tuple[Token, ...] = ()
        if delta.scores is not None:
            tokens = self._engine.read_scores(self._work.jobs[delta.choice], delta.scores)
        # The prompt's text begins behind the tokens that were added to it, such as <s>.
        added = sum(len(token.text) for token in tokens[: prompt.added])
        before = [_moved(token, -added) for token in tokens[prompt.added :]]
        behind = [_moved(token, len(prompt.text)) for token in delta.tokens]
        text = delta.text if self._started[delta.choice] else prompt.text + delta.text
        self._started[delta.choice] = True
        return delta._replace(text=text, tokens=(*before, *behind))

    def _usage(self) -> Json:
        prompt = sum(len(prompt.ids) for prompt in self._work.prompts)
        generated = sum(self._generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }


def _readers(ask: Ask, work: Work) -> list[MessageReader | None]:
    """What reads the calls in each text; None where nothing may be called."""
    tools = ask.tools if isinstance(ask, ChatAsk) else None
    if tools is None or work.format is None:
        return [None] * len(work.jobs)
    return [MessageReader(tools, work.format) for _ in work.jobs]


def _moved(token: Token, by: int) -> Token:
    return token._replace(offset=token.offset + by)


KIND = "text_completion"


def _chat_choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
