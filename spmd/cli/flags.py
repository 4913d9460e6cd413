"""Parses the flags of all programs by argparse, with the same spelling and the same help.

A flag's words are joined by underscores; dashes are read as underscores. A switch `--scan` has its
opposite `--noscan`, or `--no_scan`. If flags cannot be parsed, a program prints one line and ends
with exit code 2.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from spmd.installed import as_called

Add = Callable[..., argparse.Action]  # `add_argument` of a parser or of a group of flags


class Parser(argparse.ArgumentParser):
    """Parses the flags of a program; `about` is the text, often a docstring, that begins `--help`.

    With `settings` a flag `--settings FILE` reads flags from YAML files (`spmd.cli.settings`).

    Example:
      >>> flags = Parser("spmd explain", "Explains a program.")
      >>> _ = flags.add_argument("--dry_run", action=Switch, help="start nothing")
      >>> flags.parse_args(["--dry-run"]).dry_run
      True
    """

    def __init__(
        self, prog: str, about: str | None, *, settings: bool = False, **more: Any
    ) -> None:
        prog = as_called(prog)
        super().__init__(prog, description=about, formatter_class=_Help, allow_abbrev=False, **more)
        self._files: Parser | None = None  # which reads `--settings` alone
        if settings:
            self._files = Parser(prog, None, add_help=False)
            for parser in (self, self._files):
                parser.add_argument(
                    "--settings",
                    action="append",
                    default=[],
                    metavar="FILE",
                    help="YAML with flags by name, as in `steps: 100`; a flag beside it overrides "
                    "it, and so does a later file",
                )
            self.add_argument(
                "--print_settings", action=Switch, help="print all flags as such a file, and end"
            )

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses as argparse does, after dashes in flags' names have become underscores.

        Flags in `--settings` files come first; `--print_settings` prints all flags and exits.
        """
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)  # what follows are no flags
        words[:end] = map(_underscored, words[:end])
        given, unknown = super().parse_known_args(self._from_files(words[:end]) + words, namespace)
        if getattr(given, "print_settings", False) and not unknown:
            print(self.settings_text(given), end="")
            self.exit()
        return given, unknown

    def format_help(self) -> str:
        """Returns the text of `--help`; installed from a wheel, `scripts/x` in it is `spmd-x`."""
        return as_called(super().format_help())

    def _from_files(self, words: Sequence[str]) -> list[str]:
        if self._files is None:
            return []
        from spmd.cli import settings  # not at the top: it needs PyYAML

        try:
            files = self._files.parse_known_args(words)[0].settings
            read = [settings.read(file, self) for file in files]
        except settings.SettingsError as error:
            self.error(str(error))
        # What is given later counts alone, also of a flag that may be repeated.
        flags = self._option_string_actions
        given = [flags.get(word.partition("=")[0]) for word in words]
        found = {name: said for file in read for name, said in file.items() if said}
        return [w for name, said in found.items() if flags[f"--{name}"] not in given for w in said]

    def settings_text(self, given: argparse.Namespace) -> str:
        """Returns parsed flags as YAML, in the form that `--settings` reads."""
        from spmd.cli import settings  # as above

        return settings.write(self, given)

    def error(self, message: str) -> NoReturn:
        """Prints the message as one line, without a list of flags, and ends with exit code 2."""
        self.exit(2, f"error: {message}; {self.prog} --help lists the flags\n")


class Switch(argparse.Action):
    """Argparse action of a switch: `--name` sets True, `--noname` (or `--no_name`) sets False."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, default: bool = False, help: str = ""
    ) -> None:
        name = option_strings[0].removeprefix("--")
        names = [f"--{name}", f"--no{name}", f"--no_{name}"]
        super().__init__(names, dest, nargs=0, default=default, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Sets the flag to True if it was spelled `--name`, to False if it was its opposite."""
        setattr(namespace, self.dest, option_string == self.option_strings[0])


class _Help(argparse.RawDescriptionHelpFormatter):
    """Formats `--help`: keeps the description's line breaks, and shows defaults as `[100]`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=100)

    def add_usage(self, usage: str | None, actions: Any, *more: Any, **named: Any) -> None:
        rest = [str(a.metavar or a.dest) for a in actions if not a.option_strings]
        super().add_usage(usage or " ".join(["%(prog)s [flags]", *rest]), actions, *more, **named)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names = {"int": "N", "positive": "N", "float": "X", "Path": "PATH"}
        return names.get(getattr(action.type, "__name__", ""), "TEXT")

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, Switch):
            return f"--[no]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default is None or default is False or default in ("", [], (), {}, argparse.SUPPRESS):
            return text
        return f"{text} [{_spelled(default).replace('%', '%%')}]"


def positive(text: str) -> int:
    """Parses an integer of at least 1; ValueError for any other text."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def words(text: str) -> tuple[str, ...]:
    """Splits a text at its commas: `a,b` -> ("a", "b"); an empty text -> ()."""
    return tuple(text.split(",")) if text else ()


def numbers(text: str) -> tuple[int, ...]:
    """Parses `64,256` as integers of at least 1; ValueError for any other text."""
    return tuple(map(positive, words(text)))


def _spelled(value: Any) -> str:
    """Returns a default as a flag spells it: ("a", "b") -> `a,b`; {"data": 4} -> `data=4`."""
    if isinstance(value, dict):
        return ",".join(f"{name}={_spelled(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(map(_spelled, value))
    return str(value).lower() if value is True else str(value)


def _underscored(word: str) -> str:
    """Replaces dashes in a flag's name: `--dry-run=a-b` -> `--dry_run=a-b`; other words stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
