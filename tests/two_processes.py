"""Two processes of one job, which run a script together and say what came of it."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd.models.llama.weights import files
from spmd.scripts.jobs.local import free_port, with_device_count
from tests.forked import Forked


def run_both(script: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """What each of two processes says in its last line, which is JSON.

    They have two CPU devices each. Their arguments are a port, a rank, and those given.
    """
    environment = {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": with_device_count(os.environ["XLA_FLAGS"], 2)
    }  # fmt: skip
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        started = [
            Forked(script, [port, str(rank), *arguments], Path(folder, str(rank)), environment)
            for rank in range(2)
        ]
        try:
            codes, outputs = [each.wait() for each in started], [each.said for each in started]
        finally:
            for each in started:
                each.kill()
    assert codes == [0, 0], "\n".join(outputs)
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
