"""Servers of small models with random weights, each a process of its own."""

import os
import re
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Self

from spmd.models.decode import ServingShape
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import named_config
from spmd.models.llama.weights.sources import fresh_source
from spmd.serving.llama_bundle import write_llama_bundle

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 1800.0


class Server:
    """A process of scripts/serve; killed where the context ends.

    Args:
      bundle: what it serves.
      work: for its log and its cache.
      flags: more of them.
      more: variables of its own.
    """

    def __init__(self, bundle: Path, work: Path, *flags: str, **more: str) -> None:
        self.log = work / "log"
        path = os.pathsep.join([str(ROOT), *sys.path[1:]])
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **more}
        command = [sys.executable, "-m", "spmd.scripts.serve_bundle", str(bundle), "--port", "0"]
        command += ["--cache_dir", str(work / "cache"), *flags]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, cwd=ROOT
            )

    def said(self, pattern: str) -> tuple[str, ...]:
        """Waits for a line of the log; exits where the server ends before."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            has_ended = self.process.poll() is not None
            if found := re.search(pattern, self.log.read_text()):
                return found.groups()
            if has_ended:
                break
            time.sleep(0.02)
        sys.exit(f"the server did not say {pattern!r}:\n{self.log.read_text()}")

    @cached_property
    def url(self) -> str:
        """Where it listens, once it does."""
        return self.said(r"listening on (http://[\d.]+:\d+)")[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()


def write_bundle(
    folder: Path, config: LlamaConfig, shape: ServingShape, platform: str = "cpu"
) -> None:
    """A bundle of a Llama with random weights."""
    with fresh_source(config, 0) as source:
        write_llama_bundle(source, folder, shape, dtype="float32", platforms=(platform,))


def write_tiny(folder: Path) -> None:
    """A bundle of a tiny one: 8 slots of 256 tokens."""
    shape = ServingShape(8, 256, (8, 64), (256,), 16, 1, 5, "float32")
    write_bundle(folder, named_config("tiny"), shape)
