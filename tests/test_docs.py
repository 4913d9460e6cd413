"""What the pages show works: Python runs as it stands, commands and their flags exist.

A page's blocks run in order, with the names and in the folder of the blocks before them, as its
reader's do. An HTML comment directly above a block says what is special about it:

    <!-- not run: it needs a TPU -->    Python that is shown only, and why
    <!-- run -->                        a shell block whose commands are run too
    <!-- prints -->                     the text that the Python block before it prints
"""

import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.greedy import plan_all_greedily
from tests.imports import module_name
from tests.markdown import PAGES, ROOT, Block, blocks_of, name_of

LANGUAGES = {"python", "sh", "text", "json", "yaml", "cpp"}
NOT_RUN = "not run: "
ELSEWHERE = {
    "docs/examples.md": "tests/test_examples.py",
    "docs/examples_serving.md": "tests/test_examples.py",
    "docs/examples_training.md": "tests/test_examples.py",
    "docs/custom_calls.md": "tests/lowering/test_custom_calls.py",
    "docs/pytorch.md": "tests/torch/test_page.py",
}
"""Pages whose blocks a test of their own runs."""

PRINT_PLANS = {"README.md", "docs/explain.md", "docs/benchmarks/long.md"}
"""Pages that print what the exact planner chose; others are planned greedily."""

PLANS_OF_MINUTES = {"docs/benchmarks/long.md"}
"""Pages whose Python is run only by `-m heavy`."""

JOBS = {"local", "slurm", "jobset", "tpu-vm"}
"""Kinds of job that `scripts/launch` knows, each with flags of its own."""

OTHERS = {"docker", "git"}
"""Commands that are not ours: all that is checked is that they are these."""

FOLDERS = "spmd|models|serving|scripts|examples|benchmarks|tools|tests"

PYTEST = "scripts/test"
SHELL_SCRIPTS = {"scripts/check", "scripts/docs"}
"""Scripts in shell that explain themselves in their first lines."""


def read(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"))


def with_blocks(language: str) -> list[Path]:
    here = [page for page in PAGES if name_of(page) not in ELSEWHERE]
    return [page for page in here if any(b.language == language for b in read(page))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_labelled(page: Path) -> None:
    fences = re.findall(r"(?m)^```", page.read_text(encoding="utf-8"))
    blocks = read(page)
    assert len(fences) == 2 * len(blocks), "a fence has no end, or its note is not directly above"
    assert {block.language for block in blocks} <= LANGUAGES


def python_pages() -> Iterator[Any]:
    for page in with_blocks("python"):
        marks: Any = pytest.mark.thorough if name_of(page) != "README.md" else ()
        if name_of(page) in PLANS_OF_MINUTES:
            marks = pytest.mark.heavy
        yield pytest.param(page, marks=marks, id=name_of(page))


@pytest.mark.parametrize("page", [*python_pages()])
def test_python_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Each block, but for those that say why they are not run; and they print what is shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    if name_of(page) not in PRINT_PLANS:
        plan_all_greedily(monkeypatch)
    for block in read(page):
        if block.language == "python":
            if reason_of(block) is None:
                code = "\n" * (block.line - 1) + block.text  # errors name the page's line
                exec(compile(code, str(page), "exec"), names)
                printed = capsys.readouterr().out.rstrip() + "\n"
        elif block.language == "sh" and block.note == "run":
            for command in commands_of(block):
                module, arguments = module_of(command)
                assert importlib.import_module(module).main(arguments) == 0
            capsys.readouterr()
        elif block.note == "prints":
            if request.config.getoption("--update-golden"):
                show(page, block, printed)
            else:
                assert printed == block.text, "--update-golden writes what is printed now"


def reason_of(block: Block) -> str | None:
    """Why a block is not run, if it says that it is not."""
    if not block.note.startswith("not run"):
        return None
    assert block.note.startswith(NOT_RUN) and len(block.note.split()) > 4, (
        f"line {block.line}: say why it is not run"
    )
    return block.note.removeprefix(NOT_RUN)


def show(page: Path, block: Block, printed: str) -> None:
    shown, now = (f"<!-- prints -->\n```text\n{text}```" for text in (block.text, printed))
    page.write_text(page.read_text(encoding="utf-8").replace(shown, now), encoding="utf-8")


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.mark.thorough
@pytest.mark.parametrize("page", with_blocks("sh"), ids=name_of)
def test_commands_and_their_flags_exist(page: Path) -> None:
    for block in read(page):
        if block.language == "sh":
            for command in commands_of(block):
                check_command(command)


def check_command(words: list[str]) -> None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]  # settings of the environment
    if "--" in words:  # a command in a command, as the launcher takes it
        at = words.index("--")
        check_command(words[at + 1 :])
        words = words[:at]
    if words[0] == "pip":
        check_extras(words)
    elif words[0] not in OTHERS:
        check_flags(words)


def check_extras(words: list[str]) -> None:
    """`pip install '.[train]'` names extras that there are."""
    extras = {name for word in words for name in re.findall(r"[\w]+", word.partition("[")[2])}
    assert extras <= set(project()["optional-dependencies"]), words


def check_flags(words: list[str]) -> None:
    known = known_flags(words)
    for word in words:
        if re.match(r"--?[a-zA-Z]", word) and word != "-m":  # as in `python -m`
            flag = word.partition("=")[0]
            assert knows(known, flag), f"{' '.join(words)}: there is no flag {flag}"


def known_flags(words: list[str]) -> str:
    if words[0] == PYTEST:
        return help_of("pytest")
    if words[0] in SHELL_SCRIPTS:
        return (ROOT / words[0]).read_text(encoding="utf-8")
    if words[0] == "scripts/quickstart":
        return (ROOT / words[0]).read_text(encoding="utf-8") + help_of("spmd.scripts.train_llama")
    module, rest = module_of(words)
    kind = rest[:1] if module == "spmd.cli.main" or (rest and rest[0] in JOBS) else []
    return help_of(module, *kind)


def knows(text: str, flag: str) -> bool:
    """Whether a help text names a flag, as absl (`--[no]scan`) and argparse write it."""
    name = flag.lstrip("-")
    on = name.removeprefix("no")
    return bool(re.search(rf"(?<![\w-])--?(\[no\]({name}|{on})|{name})(?![\w-])", text))


def module_of(words: list[str]) -> tuple[str, list[str]]:
    program, *rest = words
    if Path(program).name == "python":
        if rest[0] == "-m":
            return rest[1], rest[2:]
        assert (ROOT / rest[0]).is_file(), f"there is no {rest[0]}"
        return module_name(Path(rest[0])), rest[1:]
    if program in project().get("scripts", {}):
        module, _, name = project()["scripts"][program].partition(":")
        if module == "spmd.cli.main" and rest[1] == "--serve":
            return "spmd.serving.planned", rest[2:]
        if module != "spmd.scripts.commands":
            return module, rest
        program = f"scripts/{name}"
        if not (ROOT / program).exists():
            return module_of(["python", f"{program}.py", *rest])
    text = (ROOT / program).read_text(encoding="utf-8")
    if "run_module_of" in text:  # tools/run NAME, benchmarks/run NAME
        return f"{Path(program).parent}.{rest[0]}", rest[1:]
    found = re.findall(r"exec_module \w+ (spmd\.[\w.]+)", text)
    assert len(found) == 1, f"{program} runs {found}"
    return found[0], rest


@functools.cache
def help_of(*command: str) -> str:
    module, *kind = command
    parser = parser_of(module)
    if parser is not None:
        return help_by(parser, kind)
    runner = ["benchmarks"] if module.startswith(("benchmarks.", "tools.")) else []
    asked = [sys.executable, "-m", *runner, *command, "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "No module named" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def help_by(parser: Any, kind: list[str]) -> str:
    """What a parser prints, or that of a kind of job."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parser.parse_args([*kind, "--help"])
    return printed.getvalue()


def parser_of(module: str) -> Any:
    """The flags of a module that says them without arguments: sooner than in a new process."""
    try:
        make = getattr(importlib.import_module(module), "make_parser", None)
    except ModuleNotFoundError:
        return None
    return make() if make and not inspect.signature(make).parameters else None


@functools.cache
def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        "scripts/serve model --no_such_flag 3",
        "python scripts/no_such_script.py --mesh data=8",
        "python -m spmd.serving.no_such_module x",
        "scripts/launch local --processes 2 -- python scripts/train_llama.py --no_such_flag",
        "scripts/launch slurm --no_such_flag 2 -- python scripts/train_llama.py",
        "tools/run no_such_tool",
        "pip install -e '.[no_such_extra]'",
        "scripts/test --no-such-flag",
        "no_such_command",
    ],
)
def test_a_command_that_does_not_work_is_noticed(command: str) -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        check_command(shlex.split(command))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_exist(page: Path) -> None:
    """Files that a page names in backticks or links to."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    named = re.findall(rf"`((?:{FOLDERS})/[^`\s]*)`", text)
    linked = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    missing = [path for path in named if not any(ROOT.glob(path.rstrip("/")))]
    missing += [path for path in linked if not (page.parent / path).exists()]
    assert missing == []
