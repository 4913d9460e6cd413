"""Processes that start in a fraction of a second: forked from one that has imported jax and spmd.

That one has done nothing else: it has no backend and none of XLA's threads, so its forks are like
fresh processes that have come past their imports. Flags of XLA, which are read when a backend
begins, and settings of jax are those that a process is given. Programs are planned greedily.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
PRELOADED = ["jax", "numpy", "optax", "spmd.launch", "tests.forked", "tests.greedy"]


class Forked:
    """A Python program in a process of its own.

    Args:
      program: the path of a script, or a module's name; it runs as `__main__`.
      arguments: what follows it in `sys.argv`.
      log: where its output goes.
      environment: variables of its own.
      preloaded: what to import before the first program is forked, if this is it.
    """

    def __init__(
        self,
        program: Path | str,
        arguments: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str],
        preloaded: Sequence[str] = (),
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, *preloaded])
        log.touch()
        self.log = log
        self.process = context.Process(
            target=_run, args=(program, [*map(str, arguments)], log, dict(environment))
        )
        self.process.start()

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self) -> int:
        """Its exit code, or the number of the signal that ended it as a negative number."""
        self.process.join(PATIENCE)
        code = self.process.exitcode
        assert code is not None, f"it does not end: {self.said}"
        return code

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.send_signal(signal.SIGKILL)
        self.process.join()


def run_text(
    text: str, arguments: Sequence[str | Path], folder: Path, **environment: str
) -> tuple[int, str]:
    """Runs a program that is given as text; returns its exit code and what it said.

    Its file and its output are two files in `folder`.
    """
    script = folder / "program.py"
    script.write_text(text)
    started = Forked(script, arguments, folder / "said.txt", environment)
    try:
        return started.wait(), started.said
    finally:
        started.kill()


def _run(program: Path | str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """In the process: the program, as if the interpreter had been started with it."""
    import jax

    from tests.greedy import plan_all_greedily

    plan_all_greedily(pytest.MonkeyPatch())
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        if hasattr(jax.config, setting := name.lower()):
            jax.config.update(setting, _read(environment.get(name, os.environ[name])))
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parent if isinstance(program, Path) else ROOT))
    code: Any = 0
    try:
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    # A fork ends without what is to run at an interpreter's end: there the first process of a job
    # waits for the others.
    atexit._run_exitfuncs()
    sys.exit(code or 0)


def _read(text: str) -> str | int:
    return int(text) if text.isdigit() else text
