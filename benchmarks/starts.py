"""Seconds from the start of a server to its first answer, with an empty cache and with a full one.

The model has 0.9M parameters (or is the bundle that is named), so that planning and compiling are
what takes the time. The server answers when the functions are there that all requests need; the
others follow behind. With a dash are the parts of the time until then: they follow one another, but
for those that other threads took meanwhile, added up over these.

Examples:
    benchmarks/run starts --meshes data=1,model=1 data=4,model=2
    benchmarks/run starts --bundle llama-1b --platform cuda --meshes data=1,model=1
"""

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.served import PATIENCE, Server, write_bundle
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser
from spmd.models.decode import ServingShape
from spmd.models.llama.config import LlamaConfig

DEVICES = "--xla_force_host_platform_device_count=8"

CONFIG = LlamaConfig(
    vocab_size=264,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    scan_layers=False,
)
ROWS, LENGTHS = (1, 8, 256), (256, 1024)


class Start(NamedTuple):
    """Seconds from the start of the process."""

    listens: float  # until its port is open
    ready: float  # until it takes requests
    answered: float  # until the first answer is there
    all_there: float  # until all functions are compiled
    functions: tuple[int, int]  # how many were there when it was ready, and how many there are
    # parts of the time between the first two -> seconds, as the server says
    parts: dict[str, str]
    beside: dict[str, str]  # the same of other threads meanwhile, added up over these


def measure(bundle: Path, mesh: str, work: Path, platform: str) -> Start:
    """Starts a server once."""
    started, flags = time.monotonic(), os.environ.get("XLA_FLAGS", "")
    if DEVICES.partition("=")[0] not in flags:
        flags += f" {DEVICES}"
    with Server(bundle, work, "--mesh", mesh, JAX_PLATFORMS=platform, XLA_FLAGS=flags) as server:
        url = server.url
        listens = time.monotonic() - started
        server.said(r" (ready): ")
        ready = time.monotonic() - started
        lists = server.said(r"seconds: (.*); on other threads: (.*)")
        parts, beside = (dict(re.findall(r"(\S+) ([\d.]+)", text)) for text in lists)
        there = _compiled(url)
        body = {"prompt": "def f(", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
        answered = time.monotonic() - started
        count = len(list((bundle / "functions").glob("*.mlirbc")))
        if there <= count:
            server.said(r"(more functions are compiled)")
        ended = time.monotonic() - started
        return Start(listens, ready, answered, ended, (there - 1, count), parts, beside)


def _compiled(url: str) -> int:
    """Programs that are there; the one that makes the state is one of them."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    found = re.search(r"^spmd:compile_total\S* (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    parser = Parser("benchmarks/run starts", __doc__)
    parser.add_argument("--bundle", type=Path, help="instead of the model with random weights")
    parser.add_argument("--meshes", nargs="+", default=["data=1,model=1", "data=4,model=2"])
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(arguments)
    starts: dict[str, Start] = {}
    with tempfile.TemporaryDirectory() as made:
        for mesh in given.meshes:
            work = Path(made) / mesh.replace(",", "-")
            work.mkdir()
            bundle = given.bundle or _exported(work, mesh, given)
            for cache in ("empty", "full"):
                starts[f"{mesh}, {cache} cache"] = measure(bundle, mesh, work, given.platform)
    print_head(("seconds", *starts))

    def add(name: str, values: Iterable[float | str]) -> None:
        print_line([name, *(x if isinstance(x, str) else f"{x:.1f}" for x in values)])

    all_starts = list(starts.values())
    add("port open", (start.listens for start in all_starts))
    for name in dict.fromkeys(name for start in all_starts for name in start.parts):
        add(f"- {name}", (start.parts.get(name, "") for start in all_starts))
    add("ready", (start.ready for start in all_starts))
    for name in dict.fromkeys(name for start in all_starts for name in start.beside):
        add(f"- beside: {name}", (start.beside.get(name, "") for start in all_starts))
    add("first answer", (start.answered for start in all_starts))
    add("all functions", (start.all_there for start in all_starts))
    add("there when ready", ("{} of {}".format(*start.functions) for start in all_starts))


def _exported(work: Path, mesh: str, given: argparse.Namespace) -> Path:
    found = re.search(r"data=(\d+)", mesh)
    folder = work / "bundle"
    groups = int(found[1]) if found else 1
    shape = ServingShape(8, 1024, ROWS, LENGTHS, 64, groups, 5, "float32")
    write_bundle(folder, CONFIG, shape, given.platform)
    return folder
