"""Which tokens a completion may have: grammars, allowed ids, and how many come before its end."""

from __future__ import annotations

import dataclasses

from serving.engine.choice import Job
from serving.engine.masks import counted_masks
from serving.errors import invalid
from serving.grammar.compiler import Grammar, Grammars
from serving.grammar.guide import GrammarError
from serving.grammar.place import find_problem
from serving.http.protocol import Ask, ChatAsk
from serving.http.service import Language
from serving.http.structure import compile_structure, refusal
from serving.http.tools.ask import Tools
from serving.http.tools.formats import Format
from serving.http.tools.grammar import calls_grammar


def compile_grammar(ask: Ask, grammars: Grammars, format: Format | None) -> Grammar | None:
    """The grammar that a request's texts have to fit; None if it asks for none.

    Args:
      ask: the request.
      grammars: compiles it; that may take a second.
      format: how the model writes calls of tools, if the request has some.

    Raises:
      ApiError: it is wrong, too large, or cannot be enforced; the error has the place.
    """
    tools, structure = ask.tools if isinstance(ask, ChatAsk) else None, ask.structure
    # Who has to call a tool has no content that could have a form.
    if structure is not None and not (tools and tools.must):
        alone = compile_structure(structure, grammars)
        if tools is None:
            return alone
    if tools is None or format is None:
        return None
    if not tools.must and structure is None and not any(tool.strict for tool in tools.callable):
        return None
    content = None if structure is None else structure.value
    try:
        return calls_grammar(grammars, format, tools, content)
    except GrammarError as error:
        raise refusal(*_blamed(tools, grammars, str(error))) from error


def _blamed(tools: Tools, grammars: Grammars, reason: str) -> tuple[str, str]:
    """(the place in the request, what is wrong there)."""
    for i, tool in enumerate(tools.all):
        found = find_problem(tool.schema, grammars.schema_problem)
        if tool.strict and found is not None:
            return f"tools[{i}].function.parameters{found[0]}", found[1]
    return "tools", reason


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
