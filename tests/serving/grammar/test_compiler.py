"""Grammars: what they allow, for bytes and for tokenizers of words, and what stops them."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from spmd.models.training.data.tokenizer import ByteTokenizer, load_tokenizer
from spmd.serving.grammar.compiler import Grammars
from spmd.serving.grammar.guide import GrammarError, GrammarGuide, TooHard
from spmd.serving.grammar.place import find_problem
from spmd.serving.http.fields import Fields
from spmd.serving.http.tools.ask import parse_tools
from spmd.serving.http.tools.formats import FORMATS
from spmd.serving.http.tools.grammar import calls_grammar
from tests.serving.engine.test_guides import ids

MOST = 64 * 2**10


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteTokenizer(), 300, {0, 290}, MOST)


def after(guide: GrammarGuide, tokens: Any) -> list[int]:
    for token in tokens:
        assert token in ids(guide.allowed()), chr(token)
        guide.take(token)
    return ids(guide.allowed())


def test_ends(grammars: Grammars) -> None:
    """Stop ids are allowed where a text is whole, and alone where nothing can follow."""
    grammar = grammars.regex("ab?")
    assert after(grammar.guide(), b"") == [97]
    assert after(grammar.guide(), b"a") == [0, 98, 290]
    assert after(grammar.guide([291]), b"a") == [0, 98, 290, 291]
    assert after(grammar.guide(min_tokens=2), b"a") == [98]
    assert after(grammar.guide(min_tokens=9), b"ab") == [0, 290]
    guide = grammar.guide()
    with pytest.raises(GrammarError):
        guide.take(120)
        guide.allowed()


def test_blanks_are_bounded(grammars: Grammars) -> None:
    guide = grammars.schema({"type": "array", "items": {"const": 1}}).guide()
    space = [9, 10, 13, 32]
    assert not set(after(guide, b"[ ")) & set(space)
    assert 10 in after(guide, b"1") and 9 not in after(guide, b"")
    assert set(after(guide, b"\n" + b" " * 40)) == set(b",]")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "objct"}, ""),
        ({"properties": {"a": {"not": {}}}}, "/properties/a"),
        ({"anyOf": [{"type": "null"}, {"items": {"uniqueItems": True, "type": "array"}}]},
         "/anyOf/1/items"),
        ({"$defs": {"x": {"pattern": "(?=a)", "type": "string"}}, "$ref": "#/$defs/x"}, "/$defs/x"),
        ({"items": {"$ref": "#/$defs/none"}}, "/items"),
        ({"items": {"$ref": "http://example.com/x"}}, "/items"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_has_a_place(grammars: Grammars, schema: Any, place: str) -> None:
    found = find_problem(schema, grammars.schema_problem)
    assert found is not None and found[0] == place
    assert "\n" not in found[1] and len(found[1]) <= 240


def test_hostile_grammars_end_soon(grammars: Grammars) -> None:
    """Those that would take minutes, or the process's stack, are refused or do no harm."""
    deep = '{"items":' * 5000 + "{}" + "}" * 5000
    attacks: list[Any] = [
        lambda: grammars.lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        lambda: grammars.regex("(" * 20_000 + "a" + ")" * 20_000),
        lambda: grammars.lark(f"start: %json {deep}"),
        lambda: grammars.lark("start: start").guide(),
        lambda: grammars.schema({"enum": [f"value {i}" for i in range(10_000)]}),
        lambda: grammars.lark('root ::= ("a"'),
        lambda: grammars.schema({"$ref": "#"}).guide(),
        lambda: grammars.schema(7),
    ]
    for attack in attacks:
        with pytest.raises(GrammarError):
            attack()
    for harmless in ("((a|b){1,500}c){1,500}", "(a|b)*a(a|b){30}", "(a{1,1000}){1,1000}"):
        guide, rng = grammars.regex(harmless).guide(), random.Random(0)
        with contextlib.suppress(GrammarError):  # of its automaton, not of the process
            for _ in range(300):
                after(guide, [rng.choice([i for i in ids(guide.allowed()) if 0 < i < 256])])
    wide = {"properties": {f"p{i}": {"type": "null"} for i in range(900)}}
    assert ids(grammars.schema(wide).guide().allowed())
    guide = grammars.lark('start: s\ns: s s | "a" | "b"?').guide()
    with pytest.raises(GrammarError, match="items"):  # it is ambiguous in ever more ways
        after(guide, b"a" * 5000)


@pytest.mark.thorough
def test_grammars_that_would_take_minutes() -> None:
    """The process that tries them dies of them; the next grammar has a new one."""
    grammars = Grammars(ByteTokenizer(), 256, {0}, MOST)
    patterns: dict[str, Any] = {f"^a{i}(x|y)*x(x|y){{10}}$": {} for i in range(1000)}
    schema = {"properties": {"a": {"type": "object", "patternProperties": patterns}}}
    with pytest.raises(TooHard, match="too much time or memory"):
        grammars.schema(schema)
    assert find_problem({"not": {}, **schema}, grammars.schema_problem) == (
        "", 'Unimplemented keys: ["not"]',
    )  # fmt: skip
    assert after(grammars.schema({"const": 1}).guide(), b"1") == [0]


def test_the_same_grammar_is_compiled_once(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert grammars.schema(schema) is grammars.schema(dict(schema))
    one, other = grammars.schema(schema).guide(), grammars.schema(schema).guide()
    assert after(one, b"{") != after(other, b"")


MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def words(tmp_path_factory: Any) -> Any:
    """A byte-level BPE that has the marks of calls as special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        ['{"name": "add", "arguments": {"a": 1}}'] * 9, 340, special_tokens=["</s>", *MARKS]
    )
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_marks_that_are_special_tokens(words: Any, format: Any, choice: str) -> None:
    """The model writes them as such, and texts have them; its own end is not among the texts."""
    grammars = Grammars(words, 352, {words.eos_id}, MOST)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "add", "parameters": schema, "strict": True}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    tools = parse_tools(Fields(body))
    assert tools is not None
    guide = calls_grammar(grammars, format, tools).guide()
    before = "" if choice == "required" or format.bare else "Let me see. "
    (tokens,) = words.encode_batch([before + format.written("add", {"a": 1})])
    special = [i for i in range(len(MARKS) + 1)]
    assert format.bare or set(tokens.tolist()) & set(special)
    assert words.eos_id in after(guide, tokens.tolist())


def test_a_tokenizer_of_words(words: Any) -> None:
    """Every path through the masks is a text that fits; ids that are no tokens are never drawn."""
    grammars, rng = Grammars(words, 352, {words.eos_id}, MOST), random.Random(0)
    grammar = grammars.schema(
        {"type": "array", "items": {"enum": ["add", 12, {"a": 1}]}, "maxItems": 4}
    )
    for _ in range(30):
        guide, tokens = grammar.guide(), list[int]()
        while True:
            allowed = ids(guide.allowed())
            assert max(allowed) < words.vocab_size
            token = rng.choice(allowed)
            if token == words.eos_id:
                break
            guide.take(token)
            tokens.append(token)
        assert all(one in ("add", 12, {"a": 1}) for one in json.loads(words.decode(tokens)))
