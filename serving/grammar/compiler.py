"""Compiles grammars with llguidance, for one tokenizer."""

import functools
import json
import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from spmd.models.training.data.tokenizer import BYTE_VOCABULARY, Tokenizer
from spmd.serving.engine.backend import Words
from spmd.serving.engine.guide import words_of
from spmd.serving.grammar.guide import GrammarError, GrammarGuide, TooHard
from spmd.serving.grammar.trial import GrammarTrial, byte_tokenizer, matcher_of

SPACE = r"( |\n[ \t]{0,40})"
"""What may be between the parts of JSON: a blank, or a line break and what indents the next line.
Without a bound a model may write blanks without end."""

MOST_ITEMS = {True: 10_000, False: 300}
"""Of a row of the parser, of our grammars and of others. JSON takes a few for each property that
may come next. Grammars that clients write may be ambiguous, and then take ever longer: they fail
before a mask takes tens of milliseconds."""

KEPT = 16
"""So many compiled grammars are kept: clients send the same ones again and again. Each has up to
`trial.MEMORY` bytes."""


class Grammar(NamedTuple):
    """A compiled grammar."""

    matcher: llguidance.LLMatcher  # at the beginning of a text; guides go on with copies
    left_out: tuple[str, ...]  # what of a schema is not enforced
    ends: Words  # the ids that the matcher takes for an end
    stops: Words  # the model's own stop ids
    vocabulary: int  # number of token ids

    def guide(self, stop_ids: Collection[int] = (), min_tokens: int = 0) -> GrammarGuide:
        """An automaton at the beginning of a completion, its first mask made.

        Args:
          stop_ids: end the completion beside the model's own.
          min_tokens: so many tokens are drawn before the end, if the grammar has so many.

        Raises:
          GrammarError: no text fits.
        """
        stops = self.stops | words_of(stop_ids, self.vocabulary)
        made = GrammarGuide(self.matcher.deep_copy(), self.ends, stops, min_tokens)
        made.allowed()
        return made


class Grammars:
    """Compiles grammars for one model, and keeps those that come again.

    Compiling lets other threads run, and takes a few seconds at most.

    Args:
      stop_ids: end completions.
      most_bytes: of a grammar, schemas included.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: int, stop_ids: Collection[int], most_bytes: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stops = words_of(stop_ids, vocabulary)
        # Others are no tokens of the tokenizer.
        self._ends = sorted(i for i in stop_ids if i < tokenizer.vocab_size)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._trial = GrammarTrial()
        self._made: llguidance.LLTokenizer | None = None
        self._compiled = functools.lru_cache(KEPT)(self._compile)

    def schema(self, schema: Any, *, lenient: bool = False) -> Grammar:
        """JSON that fits a schema.

        Args:
          lenient: whether what cannot be enforced is left out.

        Raises:
          GrammarError: it is wrong, too large, or has what cannot be enforced.
        """
        text = json.dumps({**_object(schema), "x-guidance": {}})
        options: Any = {"whitespace_pattern": SPACE, "lenient": lenient}
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        return self._compiled(source, True)

    def schema_problem(self, schema: Any, *, lenient: bool = False) -> str | None:
        """Why a schema cannot be enforced; None if it can.

        Raises:
          TooHard: it takes too long to find out.
        """
        try:
            self.schema(schema, lenient=lenient)
        except TooHard:
            raise
        except GrammarError as error:
            return str(error)
        return None

    def regex(self, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole.

        Raises:
          GrammarError: it is wrong or too large.
        """
        return self._compiled(llguidance.LLMatcher.grammar_from_regex(pattern), False)

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of some texts.

        Raises:
          GrammarError: they are too large.
        """
        return self.ours("start: " + " | ".join(map(json.dumps, texts)))

    def lark(self, source: str) -> Grammar:
        """Text that a context-free grammar derives.

        Args:
          source: in llguidance's dialect of Lark, or in llama.cpp's GBNF (with `root ::=`).

        Raises:
          GrammarError: it is wrong or too large.
        """
        if "::=" in source:
            try:
                source = gbnf_to_lark(source)
            except Exception as error:
                raise GrammarError(f"this is no GBNF: {error}") from error
        return self._compiled(llguidance.LLMatcher.grammar_from_lark(source), False)

    def ours(self, source: str) -> Grammar:
        """The same of a grammar in Lark that the server has written.

        Raises:
          GrammarError: a part of it that clients wrote is wrong, or it is too large.
        """
        return self._compiled(llguidance.LLMatcher.grammar_from_lark(source), True)

    def mark(self, text: str) -> str:
        """How a grammar in Lark says a mark such as `[TOOL_CALLS]`, be it a special token or not.

        Raises:
          GrammarError: the tokenizer cannot be used for grammars.
        """
        tokenizer = self._ll()
        ids = tokenizer.tokenize_str(text, parse_special=True)
        if len(ids) == 1 and tokenizer.is_special_token(ids[0]):
            return f"<[{ids[0]}]>"
        return json.dumps(text)

    def _compile(self, source: str, is_ours: bool) -> Grammar:
        if len(source.encode()) > self._most_bytes:
            raise GrammarError(
                f"the grammar has {len(source.encode())} bytes; {self._most_bytes} are the most"
            )
        if not self._trial.passes(source, MOST_ITEMS[is_ours]):
            raise TooHard("compiling the grammar takes too much time or memory")
        matcher = matcher_of(self._ll(), source, MOST_ITEMS[is_ours])
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        ends = words_of(self._ends, self._vocabulary)
        left_out = tuple(matcher.get_grammar_warnings())
        return Grammar(matcher, left_out, ends, self._stops, self._vocabulary)

    def _ll(self) -> llguidance.LLTokenizer:
        """The tokenizer for llguidance; with a hundred thousand tokens that takes a second."""
        with self._lock:
            if self._made is not None:
                return self._made
            source: Any = self._tokenizer.spec
            if source is None:
                source = byte_tokenizer(self._tokenizer.eos_id, BYTE_VOCABULARY)
            how: Any = {"n_vocab": self._vocabulary, "eos_token": self._ends}
            try:
                self._made = llguidance.LLTokenizer(source, **how)
            except Exception as error:
                text = f"this model's tokenizer cannot be used for it: {error}"
                raise GrammarError(text) from error
            return self._made


def inline(schema: Any, *, lenient: bool = False) -> str:
    """A schema as a part of a grammar in Lark."""
    options = {"whitespace_pattern": SPACE, "lenient": lenient}
    return "%json " + json.dumps({**_object(schema), "x-guidance": options})


def _object(schema: Any) -> dict[str, Any]:
    """A schema as an object: `true` is any JSON, `false` none."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarError("a schema is an object, or true or false")
    return schema
