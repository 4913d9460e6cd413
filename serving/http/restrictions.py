"""Which tokens a completion may have: grammars, allowed ids, and how many come before its end."""

from __future__ import annotations

import dataclasses

from serving.engine.choice import Job
from serving.engine.masks import counted_masks
from serving.errors import invalid
from serving.grammar.compiler import Grammar
from serving.grammar.guide import GrammarError
from serving.http.protocol import Ask
from serving.http.service import Language
from serving.http.structure import refusal


def restricted(job: Job, ask: Ask, grammar: Grammar | None, language: Language) -> Job:
    """A job with all that says which tokens it may have.

    Args:
      job: without any of that.
      ask: the request.
      grammar: that its text has to fit, if any.
      language: the model.

    Raises:
      ApiError: no text can be as it is asked for.
    """
    if ask.min_tokens > job.max_tokens:
        raise invalid(
            f"min_tokens: at most max_tokens, which are {job.max_tokens}, not {ask.min_tokens}",
            "min_tokens",
        )
    job = dataclasses.replace(job, min_tokens=ask.min_tokens)
    if grammar is not None:
        return _guided(job, ask, grammar, language.stop_ids)
    vocabulary = language.bounds.vocab_size
    masks = counted_masks(vocabulary, ask.allowed_ids, job.stop_ids, ask.min_tokens)
    if any(mask is not None and not mask.any() for _, mask in masks):
        raise invalid("min_tokens: all tokens that are allowed would end the text", "min_tokens")
    return dataclasses.replace(job, masks=masks)


def _guided(job: Job, ask: Ask, grammar: Grammar, stop_ids: frozenset[int]) -> Job:
    # A text has to end where nothing can follow: with `ignore_eos` it does as late as it can.
    least = job.max_tokens if ask.ignore_eos else ask.min_tokens
    try:
        guide = grammar.guide(ask.stop_ids, least)
    except GrammarError as error:
        raise refusal(ask.structure.place if ask.structure else "tools", str(error)) from error
    masks = ((0, guide.allowed()),)
    return dataclasses.replace(job, stop_ids=job.stop_ids | stop_ids, masks=masks, guide=guide)
