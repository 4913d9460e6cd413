"""Two processes of one job, which run a script together and say what came of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.llama.weights import files

ROOT = Path(__file__).parent.parent


def run_both(script: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """What each of two processes says in its last line, which is JSON.

    They have two CPU devices each. Their arguments are a port, a rank, and those given.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, script, port, str(rank), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def record_reads(
    set_attribute: Callable[[Any, str, Any], None] = setattr,
) -> list[tuple[str, tuple[int, ...], int]]:
    """(name, shape, bytes) of every slice of a tensor that is read from now on."""
    seen: list[tuple[str, tuple[int, ...], int]] = []
    read = files.read_slice

    def recording(file: Any, name: str, index: Any) -> Any:
        array = read(file, name, index)
        seen.append((name, array.shape, array.nbytes))
        return array

    set_attribute(files, "read_slice", recording)
    return seen
