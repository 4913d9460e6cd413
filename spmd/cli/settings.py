"""Reads and writes YAML files of flags: a flag's name without its dashes, and its value.

    mesh: {data: 4, model: 2}     --mesh=data=4,model=2
    data: [a.txt, b.txt]          --data=a.txt,b.txt
    learning_rate: 1e-4           --learning_rate=1e-4
    scan: false                   --noscan
    resume: true                  --resume
    tokenizer: null               nothing: as if the line were not there

A file becomes flags, which are parsed as those of the command line are. A value is the text as it
is in the file: a YAML 1.1 parser would make `1e-4` text, `10:13` the number 613, `off` false.
"""

import argparse
import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from spmd.errors import SpmdError

NOT_SETTINGS = ("help", "settings", "print_settings")  # flags that are no settings


class SettingsError(SpmdError):
    """Raised for an unusable file of settings; one line says why, with file and, if known, line."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads values as text, but for `null`, `true` and `false`."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^(null|~|)$"), ["n", "~", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?i:true|false)$"), [*"tTfF"])


def read(file: str | Path, parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Returns each setting of a file as command-line words: {"scan": ["--noscan"]}; [] for null.

    SettingsError: the file cannot be read, has an unknown name, or a value that its flag rejects.
    """
    flags = {_name(flag): flag for flag in _settable(parser)}
    found: dict[str, list[str]] = {}
    try:
        with open(file, encoding="utf-8") as stream:
            loader = _Loader(stream)
            root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            says = "settings are lines of a name, a colon, a space and a value, as in `steps: 100`"
            raise SettingsError(f"{file}: {says}")
        for key, node in root.value:
            where, name = f"{file}:{key.start_mark.line + 1}", str(key.value).replace("-", "_")
            if name not in flags:
                near = difflib.get_close_matches(name, flags, n=1)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise SettingsError(f"{where}: no setting is called {name!r}{hint}")
            if name in found:
                raise SettingsError(f"{where}: {name} is given twice")
            try:
                found[name] = _as_words(parser, flags[name], loader.construct_object(node, True))
            except argparse.ArgumentError as error:
                raise SettingsError(f"{where}: {name}: {error.message}") from error
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: is no text in UTF-8") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{file}: this is not YAML: {' '.join(str(error).split())}") from error
    return found


def write(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
    """Returns parsed flags as YAML from which `read` makes them again, grouped as in `--help`."""
    lines = []
    for group in parser._action_groups:
        flags = [flag for flag in group._group_actions if flag in _settable(parser)]
        if flags and group.title not in (None, "options"):
            lines.append(f"\n# {group.title}\n")
        for flag in flags:
            value = [_plain(getattr(given, flag.dest))]
            how = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False}
            text = yaml.safe_dump(value, width=float("inf"), **how).strip()[1:-1]
            lines.append(f"{_name(flag)}: {text}\n")
    return "".join(lines).lstrip("\n")


def _settable(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    flags = [flag for flag in parser._actions if flag.option_strings]
    return [flag for flag in flags if flag.dest not in NOT_SETTINGS]


def _name(flag: argparse.Action) -> str:
    return flag.option_strings[0].lstrip("-")


def _as_words(parser: argparse.ArgumentParser, flag: argparse.Action, value: Any) -> list[str]:
    """Returns a value as words: [a, b] -> ["--data=a,b"], None -> []; ArgumentError if wrong."""
    name = f"--{_name(flag)}"
    if value is None:
        return []
    if flag.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise argparse.ArgumentError(flag, f"takes true or false, not {value!r}")
        return [name if value else f"--no{_name(flag)}"]
    if flag.nargs == argparse.OPTIONAL and isinstance(value, bool):
        return [name] if value else []
    if isinstance(flag, argparse._AppendAction) and isinstance(value, list):
        return [word for item in value for word in _as_words(parser, flag, item)]
    if isinstance(value, dict):
        text = ",".join(f"{key}={_text(flag, item)}" for key, item in value.items())
    else:
        text = ",".join(_text(flag, x) for x in (value if isinstance(value, list) else [value]))
    made = parser._get_value(flag, text)
    parser._check_value(flag, made)
    # A list has to be read as so many items, and a mapping as so many: else it was not meant.
    if isinstance(value, (list, dict)):
        word, kinds = ("list", (list, tuple)) if isinstance(value, list) else ("mapping", dict)
        if not isinstance(made, kinds):
            raise argparse.ArgumentError(flag, f"does not take a {word}")
        if len(made) != len(value):
            raise argparse.ArgumentError(flag, f"a comma is within an item of this {word}")
    return [f"{name}={text}"]


def _text(flag: argparse.Action, value: Any) -> str:
    if not isinstance(value, (str, bool)):
        raise argparse.ArgumentError(flag, f"{value!r} is not a single value")
    return value if isinstance(value, str) else str(value).lower()


def _plain(value: Any) -> Any:
    """Converts a flag's value to what YAML can write; other objects become their text."""
    if isinstance(value, Mapping):
        # No flag is written as an empty mapping: it is the default of one that was left out.
        return {str(key): _plain(item) for key, item in value.items()} or None
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    is_plain = isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or is_plain else str(value)
