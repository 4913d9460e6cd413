"""Log-probabilities as JSON: OpenAI's of completions and chats, vLLM's of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serving.engine.backend import Tokens
from serving.engine.choice import Token

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""

Json = dict[str, Any]


def completion_logprobs(tokens: Sequence[Token], asked: int | None) -> Json | None:
    """Those of a completion's tokens.

    Args:
      tokens: with their alternatives.
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
      prompt: its ids.
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
