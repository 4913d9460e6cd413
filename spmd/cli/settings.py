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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from spmd.errors import SpmdError

TAG = "tag:yaml.org,2002:"
NOT_SETTINGS = ("help", "settings", "print_settings")  # flags that are no settings


class SettingsError(SpmdError):
    """Raised for a file of settings that cannot be used; one line says why, with file and line."""


def read(file: str | Path, parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Returns each setting of a file as command-line words: {"scan": ["--noscan"]}; [] for null.

    SettingsError: the file cannot be read, has an unknown name, or a value that its flag rejects.
    """
    flags = {_name(flag): flag for flag in _settable(parser)}
    lines: dict[str, int] = {}
    found: dict[str, list[str]] = {}
    for key, value in _root(file).value:
        where = f"{file}:{_line(key)}"
        if not isinstance(key, yaml.ScalarNode):
            raise SettingsError(f"{where}: a setting's name is a word, not a list or mapping")
        name = str(key.value).replace("-", "_")
        if name not in flags:
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise SettingsError(f"{where}: no setting is called {name!r}{hint}")
        if name in lines:
            raise SettingsError(f"{where}: {name} is given twice, first in line {lines[name]}")
        lines[name] = _line(key)
        try:
            found[name] = _words(parser, flags[name], value)
        except argparse.ArgumentError as error:
            raise SettingsError(f"{file}:{_line(value)}: {name}: {error.message}") from error
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


def _root(file: str | Path) -> yaml.Node:
    try:
        with open(file, encoding="utf-8") as stream:
            root = yaml.compose(stream, Loader=yaml.SafeLoader)
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: is no text in UTF-8") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        if problem and problem.startswith("but"):
            problem = f"{getattr(error, 'context', '')} {problem}"
        says = " ".join(str(problem or error).split())
        hint = "; indent with spaces" if r"'\t'" in says else ""
        raise SettingsError(f"{where}: this is not YAML: {says}{hint}") from error
    if root is None:
        raise SettingsError(f"{file}: holds no settings; write them as in `steps: 100`")
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(
            f"{file}:{_line(root)}: settings are lines of a name, a colon, a space and a value, as "
            "in `steps: 100`"
        )
    return root


def _words(parser: argparse.ArgumentParser, flag: argparse.Action, node: yaml.Node) -> list[str]:
    """Returns the words that give a flag a YAML value: [a, b] -> ["--data=a,b"]; null -> []."""
    name, truth = f"--{_name(flag)}", None
    if node.tag == f"{TAG}bool":  # `no` and `off` are words
        truth = {"true": True, "false": False}.get(node.value.lower())
    if node.tag == f"{TAG}null":
        return []
    if flag.nargs == 0:  # a switch
        if truth is None:
            shown = repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            raise argparse.ArgumentError(flag, f"takes true or false, not {shown}")
        return [name if truth else f"--no{_name(flag)}"]
    if flag.nargs == argparse.OPTIONAL and truth is not None:
        return [name] if truth else []
    if isinstance(flag, argparse._AppendAction) and isinstance(node, yaml.SequenceNode):
        return [word for item in node.value for word in _words(parser, flag, item)]
    if isinstance(node, yaml.SequenceNode):
        text = ",".join(_item(flag, item) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        text = ",".join(f"{_item(flag, k)}={_item(flag, v)}" for k, v in node.value)
    else:
        text = _item(flag, node)
    value = parser._get_value(flag, text)
    parser._check_value(flag, value)
    # A list has to be read as so many items, and a mapping as so many: else it was not meant.
    is_list, is_mapping = (isinstance(node, k) for k in (yaml.SequenceNode, yaml.MappingNode))
    if is_list or is_mapping:
        word = "list" if is_list else "mapping"
        if not isinstance(value, (list, tuple) if is_list else dict):
            raise argparse.ArgumentError(flag, f"does not take a {word}")
        if len(value) != len(node.value):
            raise argparse.ArgumentError(flag, f"a comma is within an item of this {word}")
    return [f"{name}={text}"]


def _item(flag: argparse.Action, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag == f"{TAG}null":
        what = "nothing" if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        raise argparse.ArgumentError(flag, f"there is {what} where a single value belongs")
    text = str(node.value)
    is_odd = node.tag == f"{TAG}float" and text.lower().endswith((".inf", ".nan"))
    return text.replace(".", "") if is_odd else text


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _plain(value: Any) -> Any:
    """Converts a flag's value to what YAML can write; other objects become their text."""
    if isinstance(value, Mapping):
        # No flag is written as an empty mapping: it is the default of one that was left out.
        return {str(key): _plain(item) for key, item in value.items()} or None
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
