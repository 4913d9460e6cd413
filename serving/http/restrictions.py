"""Which tokens a completion may have: grammars, allowed ids, bad words, and when it may end."""

from __future__ import annotations

import dataclasses

from serving.engine.actions import Job
from serving.engine.bad_words import BadWords, WithoutBadWords
from serving.engine.guide import GuideError
from serving.engine.masks import counted_masks
from serving.errors import invalid
from serving.grammar.compiler import Grammar
from serving.grammar.guide import GrammarError
from serving.http.language import Language
from serving.http.protocol import Ask
from serving.http.structure import refusal


def bad_words(ask: Ask, language: Language) -> BadWords | None:
    """The tokens of a request's bad words, if it has some: of each alone, and behind a blank.

    Raises:
      ApiError: a word has no tokens.
    """
    if not ask.bad_words:
        return None
    texts = [text for word in ask.bad_words for text in (word, f" {word}")]
    found = [tuple(ids.tolist()) for ids in language.tokenizer.encode_batch(texts)]
    if () in found:
        i = found.index(()) // 2
        raise invalid(f"bad_words[{i}]: the tokenizer makes no token of it", "bad_words")
    return BadWords(found, language.bounds.vocab_size)


def restricted(
    job: Job, ask: Ask, grammar: Grammar | None, bad: BadWords | None, language: Language
) -> Job:
    """A job with all that says which tokens it may have.

    Args:
      job: without any of that.
      ask: the request.
      grammar: that its text has to fit, if any.
      bad: what must not come up, if there is anything.
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
        job = _guided(job, ask, grammar, language.stop_ids)
    else:
        vocabulary = language.bounds.vocab_size
        masks = counted_masks(vocabulary, ask.allowed_ids, job.stop_ids, ask.min_tokens)
        if any(mask is not None and not mask.any() for _, mask in masks):
            message = "min_tokens: all tokens that are allowed would end the text"
            raise invalid(message, "min_tokens")
        job = dataclasses.replace(job, masks=masks)
    return job if bad is None else _without(job, bad)


def _without(job: Job, bad: BadWords) -> Job:
    """A job without bad words; of one token each they need no guide, for which steps wait."""
    try:
        if job.guide is None and not bad.reach:
            return dataclasses.replace(job, masks=bad.from_all(job.masks))
        guide = WithoutBadWords(bad, job.masks, job.guide)
        return dataclasses.replace(job, masks=((0, guide.allowed()),), guide=guide)
    except GuideError as error:
        raise invalid(str(error), "bad_words") from error


def _guided(job: Job, ask: Ask, grammar: Grammar, stop_ids: frozenset[int]) -> Job:
    # A text has to end where nothing can follow: with `ignore_eos` it does as late as it can.
    least = job.max_tokens if ask.ignore_eos else ask.min_tokens
    try:
        guide = grammar.guide(ask.stop_ids, least)
    except GrammarError as error:
        raise refusal(ask.structure.place if ask.structure else "tools", str(error)) from error
    masks = ((0, guide.allowed()),)
    return dataclasses.replace(job, stop_ids=job.stop_ids | stop_ids, masks=masks, guide=guide)
