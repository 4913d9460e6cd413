"""The grammar of calls that fit their tools, in the format of the model."""

import json
from collections.abc import Iterator
from typing import Any

from spmd.serving.grammar.compiler import Grammar, Grammars, inline
from spmd.serving.grammar.guide import GrammarError
from spmd.serving.http.tools.ask import Tools
from spmd.serving.http.tools.formats import Format
from spmd.serving.http.tools.values import SHARED, kinds_of, property_of, values_of


def calls_grammar(grammars: Grammars, format: Format, tools: Tools, content: Any = None) -> Grammar:
    """The grammar of a message with calls.

    Args:
      tools: what may be called, and whether something has to be.
      content: the schema of messages without calls, where they have one. Else they have any text.

    Raises:
      GrammarError: a schema is wrong, or has what cannot be enforced though it is strict.
    """
    notes: list[str] = []
    made = grammars.ours("\n".join(_rules(grammars, format, tools, content, notes)))
    return made._replace(left_out=(*made.left_out, *notes))


def _rules(
    grammars: Grammars, format: Format, tools: Tools, content: Any, notes: list[str]
) -> Iterator[str]:
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
            yield f"opened{_lazy(begin)}: TEXT {begin}"
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
        if format.tags is None:
            yield f"args_{i}: {inline(schema, lenient=not tool.strict)}"
        else:
            yield from _tagged(grammars, format, f"args_{i}", schema, tool.strict, notes)
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
    for mark in filter(None, format.marks[:-1]):  # its beginning was written before
        before, found, behind = text.partition(mark)
        if found:
            parts += [json.dumps(before) if before else "", grammars.mark(mark)]
            text = behind
    return " ".join(filter(None, [*parts, json.dumps(text) if text else ""]))


def _lazy(end: str) -> str:
    """How a rule is marked that has any text up to `end`: a special token is none of a text."""
    return "" if end.startswith("<[") else "[lazy]"


SAID = frozenset({"type", "title", "description", "default", "examples", "$comment", *SHARED})
"""What a schema of any text may have."""


def _tagged(
    grammars: Grammars, format: Format, name: str, schema: Any, strict: bool, notes: list[str]
) -> Iterator[str]:
    """The rules of arguments between tags, in the schema's order: those that it names.

    Raises:
      GrammarError: the tool is strict, and has what cannot be enforced between tags.
    """
    assert format.tags is not None
    keys, values = format.tags.key, format.tags.value

    def leave_out(what: str) -> None:
        problem = f"{what} cannot be enforced in the format {format.name}"
        if strict:
            raise GrammarError(problem)
        notes.append(problem)

    strange = {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"} & {*schema}
    if strange:
        leave_out(f"{min(strange)} of all arguments")
    required = [key for key in schema.get("required", ()) if isinstance(key, str)]
    properties = dict.fromkeys([*schema.get("properties", ()), *required])
    # A value that is any text ends where its tag does.
    close = grammars.mark(values[1].strip())
    is_special = close.startswith("<[")
    end = _literals(grammars, format, values[1]) if is_special else json.dumps(values[1])
    yield f"{name}_text{_lazy(close)}: /(.|\\n)*/ {end}"
    rules: list[str] = []
    for i, key in enumerate(properties):
        one = property_of(schema, key)
        kinds, fixed = kinds_of(one), values_of(one)
        if fixed:
            texts = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in fixed]
            value = f"({' | '.join(map(json.dumps, texts))}) {end}"
        elif kinds and "string" not in kinds:
            value = f"{name}_{i}_value {end}"
            yield f"{name}_{i}_value: {inline(one, lenient=not strict)}"
        else:
            parts = one["anyOf"] if isinstance(one.get("anyOf"), list) else ()
            parts = [part for part in parts if isinstance(part, dict)]
            any_text = any(part.get("type") == "string" and {*part} <= SAID for part in parts)
            beyond = {*one} - SAID - ({"anyOf"} if any_text else set())
            if beyond:
                leave_out(f"{min(beyond)} of {key}")
            value = f"{name}_text"
        head = _literals(grammars, format, f"{keys[0]}{key}{keys[1]}{values[0]}")
        yield f'{name}_{i}: {head} {value} "\\n"'
        rules.append(f"{name}_{i}" + ("" if key in required else "?"))
    if not properties and schema.get("additionalProperties", True) is not False:
        before, behind = (_literals(grammars, format, one) for one in (keys[0], keys[1]))
        start = _literals(grammars, format, values[0])
        yield f'{name}_any: {before} /[^<>=\\n]+/ {behind} {start} {name}_text "\\n"'
        rules.append(f"{name}_any*")
    yield f"{name}: {' '.join(rules) or json.dumps('')}"
