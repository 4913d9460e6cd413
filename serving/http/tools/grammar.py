"""The grammar of calls that fit their tools, in the format of the model."""

import json
from collections.abc import Iterator
from typing import Any

from spmd.serving.grammar.compiler import Grammar, Grammars, inline
from spmd.serving.http.tools.ask import Tools
from spmd.serving.http.tools.formats import Format


def calls_grammar(grammars: Grammars, format: Format, tools: Tools, content: Any = None) -> Grammar:
    """The grammar of a message with calls.

    Args:
      tools: what may be called, and whether something has to be.
      content: the schema of messages without calls, where they have one. Else they have any text.

    Raises:
      GrammarError: a schema is wrong, or has what cannot be enforced though it is strict.
    """
    return grammars.ours("\n".join(_rules(grammars, format, tools, content)))


def _rules(grammars: Grammars, format: Format, tools: Tools, content: Any) -> Iterator[str]:
    begin = "" if format.bare else grammars.mark(format.begin)
    if tools.must:
        yield "start: calls"
    elif content is not None:
        yield f"start: calls | {inline(content)}"
    else:
        yield "start: calls | TEXT"
        # In front of calls there may be text, or text is what cannot be the beginning of a call.
        yield "TEXT: /([^{ \\n](.|\\n)*)?/" if format.bare else "TEXT: /(.|\\n)*/"
        if begin:
            is_special = begin.startswith("<[")
            yield f"opened{'' if is_special else '[lazy]'}: TEXT {begin}"
            begin = "opened"
    yield _calls(format, tools, begin)
    # Calls without what begins them.
    for i, tool in enumerate(tools.callable):
        head, tail = format.around_listed(tool.name) if format.listed else format.around(tool.name)
        head = head.removeprefix(format.begin).removeprefix(format.space)
        parts = [_literals(grammars, format, text) for text in (head, tail)]
        yield f"call_{i}: {parts[0]} args_{i} {parts[1]}"
        # Tools without `strict` come from anywhere; what cannot be enforced of them is left out.
        schema = tool.schema if tools.must or tool.strict else {"type": "object"}
        yield f"args_{i}: {inline(schema, lenient=not tool.strict)}"
    yield "call: " + " | ".join(f"call_{i}" for i in range(len(tools.callable)))
    if not format.listed:
        space = f" {json.dumps(format.space)}" if format.space else ""
        yield f"begin: {grammars.mark(format.begin)}{space}"


def _calls(format: Format, tools: Tools, begin: str) -> str:
    """The rule of all calls, from what begins the first one."""
    several = tools.parallel and not format.single
    space = json.dumps(format.space) if format.space else ""
    if format.listed:
        more = '(", " call)*' if several else ""
        return f'calls: {begin} {space} "[" call {more} "]"'
    more = f"({space} begin call)*" if several else ""
    return f"calls: {begin} {space} call {more}"


def _literals(grammars: Grammars, format: Format, text: str) -> str:
    """A text as a grammar has it, its marks as special tokens where they are some."""
    parts: list[str] = []
    for mark in filter(None, (format.named, format.end)):
        before, found, behind = text.partition(mark)
        if found:
            parts += [json.dumps(before) if before else "", grammars.mark(mark)]
            text = behind
    return " ".join(filter(None, [*parts, json.dumps(text) if text else ""]))
