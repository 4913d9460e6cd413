"""The form that a text has to have: `response_format`, and vLLM's `structured_outputs`."""

import dataclasses
import json
from typing import Any, Literal

from spmd.serving.errors import ApiError, invalid
from spmd.serving.grammar.compiler import Grammar, Grammars
from spmd.serving.grammar.guide import GrammarError, TooHard
from spmd.serving.grammar.place import find_problem
from spmd.serving.http.fields import Fields, check_text, show

Kind = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")

OBJECT = {"type": "object"}
"""What `json_object` asks for."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a text has to be."""

    kind: Kind  # how that is said
    value: Any  # a schema, a pattern, texts, or a grammar
    place: str  # the field that says it
    lenient: bool = False  # whether what cannot be enforced of a schema is left out


def parse_structure(fields: Fields) -> Structure | None:
    """What the text of an answer has to be; None if it may be anything.

    Raises:
      ApiError: a field does not fit, or two of them ask for something.
    """
    found = [
        _response_format(fields.get("response_format")),
        _structured_outputs(fields.get("structured_outputs")),
        *(_named(kind, fields.get(f"guided_{kind}"), f"guided_{kind}") for kind in KINDS),
    ]
    asked = [structure for structure in found if structure is not None]
    if len(asked) > 1:
        raise invalid(f"{asked[1].place}: only without {asked[0].place}")
    return asked[0] if asked else None


def compile_structure(structure: Structure, grammars: Grammars) -> Grammar:
    """Compiles what a text has to be.

    Raises:
      ApiError: it is wrong, or cannot be enforced; the error has the place.
    """
    made = {"regex": grammars.regex, "choice": grammars.choice, "grammar": grammars.lark}
    try:
        if structure.kind == "json":
            return grammars.schema(structure.value, lenient=structure.lenient)
        return made[structure.kind](structure.value)
    except GrammarError as error:
        place, reason = "", str(error)
        if structure.kind == "json" and not isinstance(error, TooHard):
            found = find_problem(structure.value, grammars.schema_problem)
            place, reason = found or (place, reason)
        raise refusal(structure.place + place, reason) from error


def refusal(place: str, reason: str) -> ApiError:
    """What is wrong with a grammar at some place of the request."""
    return invalid(f"{place}: {reason}", code="invalid_grammar")


def _response_format(value: Any) -> Structure | None:
    if value is None:
        return None
    name = "response_format"
    if not isinstance(value, dict):
        raise invalid(f"{name}: an object is needed, not {show(value)}")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure("json", OBJECT, name)
    if kind != "json_schema":
        raise invalid(f"{name}.type: text, json_object or json_schema is needed, not {show(kind)}")
    given = value.get("json_schema")
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict | bool):
        raise invalid(f"{name}.json_schema.schema: a schema is needed")
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{name}.json_schema.strict: true or false, not {show(strict)}")
    return Structure("json", given["schema"], f"{name}.json_schema.schema", strict is False)


def _structured_outputs(value: Any) -> Structure | None:
    if value is None:
        return None
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid(f"{name}: an object is needed, not {show(value)}")
    given: dict[str, Any] = {key: one for key, one in value.items() if one is not None}
    strange = [key for key in given if key not in (*KINDS, "json_object")]
    if strange:
        raise invalid(
            f"{name}: one of {', '.join(KINDS)} or json_object is needed, not {show(strange[0])}"
        )
    if given.pop("json_object", False) is True:
        given["json"] = OBJECT
    if len(given) > 1:
        raise invalid(f"{name}: one of {', '.join(given)} is needed, not all")
    made = (_named(kind, given.get(kind), f"{name}.{kind}") for kind in KINDS)
    return next(filter(None, made), None)


def _named(kind: Kind, value: Any, place: str) -> Structure | None:
    if value is None or value in ("", [], {}):
        return None
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise invalid(f"{place}: this text is not JSON") from None
        if not isinstance(value, dict | bool):
            raise invalid(f"{place}: a schema is needed, not {show(value)}")
        return Structure(kind, value, place)
    if kind != "choice":
        return Structure(kind, check_text(value, place), place)
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise invalid(f"{place}: a list of texts is needed, none of them empty")
    return Structure(kind, tuple(check_text(one, place) for one in value), place)
