"""Turns a checked request into jobs for the engine: token ids, lengths that fit, seeds.

Which tokens a completion may have follows from grammars, allowed ids and bad words, and from when
it may end.
"""

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from spmd.models.training.data.beginnings import prompt_ids
from spmd.serving.engine.actions import Job
from spmd.serving.engine.guide import BadWords, Guide, GuideError, WithoutBadWords, counted_masks
from spmd.serving.engine.thought import Marks, ThoughtGuide, ThoughtTokens
from spmd.serving.errors import ApiError, invalid
from spmd.serving.grammar.compiler import Grammar
from spmd.serving.grammar.guide import GrammarError
from spmd.serving.http.chat_template import ChatTemplate
from spmd.serving.http.language import Language
from spmd.serving.http.protocol import Ask, ChatAsk, CompletionAsk, seeds
from spmd.serving.http.structure import refusal
from spmd.serving.http.tools.formats import Format


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
        raise invalid(f"bad_words[{i}]: the tokenizer makes no token of it")
    return BadWords(found, language.bounds.vocab_size)


def restricted(
    job: Job, ask: Ask, grammar: Grammar | None, bad: BadWords | None, language: Language
) -> Job:
    """A job with all that says which tokens it may have.

    Args:
      job: without any of that. Where it may begin with a thought, the grammar is of what follows.
      grammar: that its text has to fit, if any.
      bad: what must not come up, if there is anything.

    Raises:
      ApiError: no text can be as it is asked for.
    """
    if ask.min_tokens > job.max_tokens:
        raise invalid(
            f"min_tokens: at most max_tokens, which are {job.max_tokens}, not {ask.min_tokens}"
        )
    job = dataclasses.replace(job, min_tokens=ask.min_tokens)
    if grammar is not None:
        # A text has to end where nothing can follow: with `ignore_eos` it does as late as it can.
        least = job.max_tokens if ask.ignore_eos else ask.min_tokens
        try:
            guide: Guide = grammar.guide(ask.stop_ids, least)
        except GrammarError as error:
            raise refusal(ask.structure.place if ask.structure else "tools", str(error)) from error
        job = dataclasses.replace(job, stop_ids=job.stop_ids | language.stop_ids)
        if job.thought is not None:

            def answer(count: int) -> Guide:
                return grammar.guide(ask.stop_ids, max(least - count, 0))

            guide = _behind_thought(job, job.thought, ask, answer, language)
        job = dataclasses.replace(job, masks=((0, guide.allowed()),), guide=guide)
    else:
        vocabulary = language.bounds.vocab_size
        masks = counted_masks(vocabulary, ask.allowed_ids, job.stop_ids, ask.min_tokens)
        if any(mask is not None and not mask.any() for _, mask in masks):
            message = "min_tokens: all tokens that are allowed would end the text"
            raise invalid(message)
        job = dataclasses.replace(job, masks=masks)
        if job.thought is not None and isinstance(ask, ChatAsk) and ask.budget is not None:
            anything = BadWords((), vocabulary)

            def answer(count: int) -> Guide:
                left = tuple((max(n - count, 0), mask) for n, mask in masks)
                return WithoutBadWords(anything, left)

            guide = _behind_thought(job, job.thought, ask, answer, language)
            job = dataclasses.replace(job, masks=((0, guide.allowed()),), guide=guide)
    return job if bad is None else _without(job, bad)


def _behind_thought(
    job: Job, marks: Marks, ask: Ask, answer: Callable[[int], Guide], language: Language
) -> Guide:
    """The guide of a job that may think before its answer, which has a guide of its own."""
    begin, end, *breaks = language.ids([marks.begin, marks.end, "\n", "\n\n"])
    blanks = frozenset(ids[0] for ids in breaks if len(ids) == 1) - job.stop_ids
    tokens = ThoughtTokens(
        marks, tuple(begin), tuple(end), blanks, language.decode, lambda x: language.ids([x])[0]
    )
    budget = ask.budget if isinstance(ask, ChatAsk) else None
    return ThoughtGuide(tokens, answer, job.stop_ids, language.bounds.vocab_size, budget)


def _without(job: Job, bad: BadWords) -> Job:
    """A job without bad words; of one token each they need no guide, for which steps wait."""
    try:
        if job.guide is None and not bad.reach:
            every = job.masks or ((0, None),)
            masks = tuple((count, bad.leave(mask, ())) for count, mask in every)
            return dataclasses.replace(job, masks=masks)
        guide = WithoutBadWords(bad, job.masks, job.guide)
        return dataclasses.replace(job, masks=((0, guide.allowed()),), guide=guide)
    except GuideError as error:
        raise invalid(str(error), "bad_words") from error


class Prompt(NamedTuple):
    """A prompt as the model gets it."""

    ids: tuple[int, ...]  # token ids, at least one
    text: str  # the prompt's text. If the request had token ids, their text.
    # how many ids at the beginning were added and are not of `text`, such as the token that begins
    # documents
    added: int


class Work(NamedTuple):
    """The jobs of a request."""

    prompts: tuple[Prompt, ...]  # the request's prompts
    # `n` for each prompt: those of the first prompt, then those of the second, and so on
    jobs: tuple[Job, ...]
    notes: tuple[str, ...] = ()  # what of the request is not heeded, for people
    format: Format | None = None  # how the model writes calls, if it may call tools
    thought: Marks | None = None  # what is around the thought before the answer, if one may come


def completion_work(ask: CompletionAsk, language: Language, grammar: Grammar | None = None) -> Work:
    """Makes the jobs of a request for completions; `grammar` is the one that it asks for.

    Raises:
      ApiError: a prompt does not fit, or no text fits the grammar.
    """
    for given in ask.prompts:
        _check_size(given, ask, language)
    prompts = [_prompt(prompt, language, ask.special) for prompt in ask.prompts]
    return _work(ask, language, prompts, ask.stops, ask.echo and ask.logprobs is not None, grammar)


def chat_work(ask: ChatAsk, language: Language, grammar: Grammar | None = None) -> Work:
    """Makes the jobs of a request for chat completions; `grammar` is the one that it asks for.

    Raises:
      ApiError: the template refuses the messages, they do not fit, or no text fits the grammar.
    """
    template = language.template
    format = None if ask.tools is None else template.tool_format
    tools = () if ask.tools is None else tuple(tool.given for tool in ask.tools.all)
    arguments, notes = _arguments(ask, template)
    messages, begun = ask.messages, ""
    if ask.continues:  # a mark tells where the template has the end of the text
        begun, mark = messages[-1]["content"], secrets.token_hex(8)
        messages = (*messages[:-1], {**messages[-1], "content": begun + mark})
    text = template.render(messages, ask.generation_prompt, tools, arguments)
    if begun:
        text, found, _ = text.rpartition(mark)
        if not found:
            raise invalid("continue_final_message: the chat template leaves out the last message")
    _check_size(text, ask, language)
    # Templates write what the tokenizer puts before a text themselves, except the plain one.
    prompt = _prompt(text, language, special=template.is_default)
    stops = (*ask.stops, *template.stops)
    thought = template.thought(text, begun)
    marks = [*(format.marks if format else ()), *(thought.texts if thought else ())]
    work = _work(ask, language, [prompt], stops, False, grammar, thought, marks)
    return work._replace(notes=(*notes, *work.notes), format=format, thought=thought)


def _arguments(ask: ChatAsk, template: ChatTemplate) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(what the template gets, what is not heeded): an effort may switch thoughts on or off."""
    effort, made, known = ask.effort, dict[str, Any](), template.arguments
    if effort is None or (effort == "none" and not template.thinks):
        return dict(ask.arguments), ()
    if "enable_thinking" in known:
        made["enable_thinking"] = effort != "none"
    if "reasoning_effort" in known and made.get("enable_thinking", True):
        made["reasoning_effort"] = effort
    if not made:
        raise invalid(
            "reasoning_effort: this model's chat template does not take it; leave it out",
            code="unsupported_parameter",
        )
    heeded = effort == "none" or "reasoning_effort" in made
    notes = () if heeded else ("reasoning_effort switches thoughts on and no more",)
    return {**made, **ask.arguments}, notes


def _work(
    ask: Ask,
    language: Language,
    prompts: Sequence[Prompt],
    stops: Sequence[str],
    score: bool,
    grammar: Grammar | None,
    thought: Marks | None = None,
    marks: Sequence[str] = (),
) -> Work:
    # What tells calls and thoughts from the rest is read, whether it is special or not.
    read = {token for ids in language.ids(marks) for token in ids} if marks else set[int]()
    hidden = language.special_ids - read if ask.skip_special else frozenset[int]()
    bad = bad_words(ask, language)
    stop_ids = ask.stop_ids | (frozenset() if ask.ignore_eos else language.stop_ids)
    jobs = []
    for prompt in prompts:
        # A prompt is never cut: what was asked for does not fit or is served in full.
        length, most, max_tokens = len(prompt.ids), language.bounds.max_length, ask.max_tokens
        if max_tokens is None:
            max_tokens = max(most - length, 1)
        if length + max_tokens > most:
            raise _too_long(length, max_tokens, most, isinstance(ask, ChatAsk))
        for i, seed in enumerate(seeds(ask, secrets.randbits(32))):
            # What is said of a prompt is the same for all of its completions.
            scores = score or (ask.prompt_logprobs is not None and not i)
            job = Job(
                prompt.ids,
                max_tokens,
                dataclasses.replace(ask.sampling, seed=seed),
                stop_ids,
                tuple(stops),
                ask.logprobs,
                scores,
                thought=thought,
                hidden=hidden,
                reports_ids=ask.token_ids,
                salt=ask.salt,
                priority=ask.priority,
            )
            jobs.append(restricted(job, ask, grammar, bad, language))
    notes = () if grammar is None else grammar.left_out
    return Work(tuple(prompts), tuple(jobs), notes)


def _prompt(given: str | tuple[int, ...], language: Language, special: bool) -> Prompt:
    if not isinstance(given, str):
        return Prompt(given, language.decode(given), 0)
    ids, added = prompt_ids(language.tokenizer, given, special)
    return Prompt(tuple(ids), given, added)


def _check_size(text: str | tuple[int, ...], ask: Ask, language: Language) -> None:
    """Refuses a text that is too long whatever its tokens are: finding those takes long."""
    longest, most = language.tokenizer.longest, language.bounds.max_length
    if longest is None or not isinstance(text, str):
        return
    size = len(text.encode())
    least = -(-size // longest)
    if least > most:
        note = f" A text of {size} bytes cannot have fewer tokens."
        wanted = 1 if ask.max_tokens is None else ask.max_tokens
        raise _too_long(least, wanted, most, isinstance(ask, ChatAsk), note)


def _too_long(length: int, wanted: int, most: int, is_chat: bool, note: str = "") -> ApiError:
    where = "messages" if is_chat else "prompt"
    least = "at least " if note else ""
    return invalid(
        f"This model's maximum context length is {most} tokens, and {least}{length + wanted} were "
        f"asked for: {length} in the {where} and {wanted} in the completion. Shorten one of them."
        f"{note}",
        where,
        "context_length_exceeded",
    )
