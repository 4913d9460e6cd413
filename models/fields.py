"""Makes flags and settings from a dataclass: a field gives a flag its type, choices and default.

save_every: int = 0                            type=int, default=0
on_nonfinite: Literal["stop", "skip"] = ..     choices=("stop", "skip")
verbose: bool = False                          action=Switch
metrics: tuple[str, ...] = METRICS             type=words
profile: ProfileRange | None = field(          type: calls `ProfileRange.parse`
    default=None, metadata=read_by(ProfileRange.parse))
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from spmd.cli.flags import Add, Parser, Switch, words

T = TypeVar("T")


def read_by(read: Callable[[str], Any]) -> Mapping[str, Any]:
    """Returns metadata for a field whose text `read` parses; users see `read`'s ValueErrors."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return {"type": value}


def of_fields(add: Add, cls: type[Any]) -> Add:
    """Wraps `add_argument`: a flag gets type, choices and default from the field of `cls` it names.

    Arguments of a call override what the field says.

    Example:
        >>> parser = Parser("train", None)
        >>> _ = of_fields(parser.add_argument, Options)("--save_every", help="steps between saves")
        >>> parser.parse_args([]).save_every
        0
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)

    def add_field(name: str, **said: Any) -> argparse.Action:
        field = fields[name.removeprefix("--")]
        return add(name, **{**_flag(field, hints[field.name]), **said})

    return add_field


def taken(cls: type[T], given: argparse.Namespace, **others: Any) -> T:
    """Makes a `cls` from the parsed flags that are named as its fields; `others` override them."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in vars(given).items() if name in names} | others)


def from_yaml(cls: type[T], file: str | Path, **overrides: Any) -> T:
    """Makes a `cls` from a YAML file of `field: value`; `overrides` replace values of the file.

    `null` is None for a field that may be None, else the default. SettingsError: the file cannot be
    read, has an unknown name or a wrong value, or lacks a field that has no default.
    """
    from spmd.cli import settings  # not at the top: it needs PyYAML

    parser = Parser(cls.__name__, None)
    add = of_fields(parser.add_argument, cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        add(f"--{field.name}")
    read = settings.read(file, parser)
    given = vars(parser.parse_args([word for flag in read.values() for word in flag]))
    hints = typing.get_type_hints(cls)
    values = {
        name: given[name] if said else None
        for name, said in read.items()
        if said or types.NoneType in typing.get_args(hints[name])
    } | overrides
    for field in fields:
        if _default(field) is dataclasses.MISSING and field.name not in values:
            raise settings.SettingsError(f"{file}: {field.name} is missing")
    return cls(**values)


def _flag(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    default = _default(field)
    said: dict[str, Any] = {} if default is dataclasses.MISSING else {"default": default}
    if "type" in field.metadata:
        return {**said, "type": field.metadata["type"]}
    if isinstance(hint, types.UnionType) and types.NoneType in typing.get_args(hint):
        (hint, *_) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return {**said, "choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {**said, "type": words}
    if hint is bool:
        return {**said, "action": Switch}
    return {**said, "type": hint} if hint in (int, float) else said


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
