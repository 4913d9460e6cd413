"""The grammar that a request asks for: of its structure, of its tools, or of both."""

from __future__ import annotations

import functools

from serving.grammar.compiler import Grammar, Grammars
from serving.grammar.guide import GrammarError, TooHard
from serving.grammar.place import find_problem
from serving.http.language import Language
from serving.http.protocol import Ask, ChatAsk
from serving.http.structure import compile_structure, refusal
from serving.http.tools.ask import Tools
from serving.http.tools.grammar import calls_grammar


def asks_for_grammar(ask: Ask) -> bool:
    """Whether the texts of a request have to fit a grammar."""
    return ask.structure is not None or _are_bound(_tools(ask))


def compile_grammar(ask: Ask, language: Language) -> Grammar:
    """Compiles the grammar of a request that asks for one; that may take seconds.

    Raises:
      ApiError: it is wrong, too large, or cannot be enforced; the error has the place.
    """
    tools, structure = _tools(ask), ask.structure
    # Who has to call a tool has no content that could have a form.
    if structure is not None and not (tools and tools.must):
        alone = compile_structure(structure, language.grammars)
        if tools is None:
            return alone
    assert tools is not None
    content = None if structure is None else structure.value
    try:
        return calls_grammar(language.grammars, language.template.tool_format, tools, content)
    except GrammarError as error:
        raise refusal(*_blamed(tools, language.grammars, error)) from error


def _tools(ask: Ask) -> Tools | None:
    return ask.tools if isinstance(ask, ChatAsk) else None


def _are_bound(tools: Tools | None) -> bool:
    """Whether calls have to fit their tools."""
    return tools is not None and (tools.must or any(tool.strict for tool in tools.callable))


def _blamed(tools: Tools, grammars: Grammars, error: GrammarError) -> tuple[str, str]:
    """(the place in the request, what is wrong there)."""
    for i, tool in enumerate(() if isinstance(error, TooHard) else tools.all):
        problem = functools.partial(grammars.schema_problem, lenient=not tool.strict)
        found = find_problem(tool.schema, problem)
        if found is not None:
            return f"tools[{i}].function.parameters{found[0]}", found[1]
    return "tools", str(error)
