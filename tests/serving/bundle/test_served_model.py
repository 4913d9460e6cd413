"""A real model behind the real server: OpenAI's client, texts at a terminal, errors."""

import contextlib
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spmd.models.decode import ServingShape
from spmd.scripts import generate_text
from tests.forked import Forked
from tests.serving.conftest import write_tiny
from tests.serving.http.live import get
from tests.waiting import PATIENCE, wait_until

SHAPE = ServingShape(4, 64, (32,), (64,), 16, 2, 5, "float32")
PROMPT = "def main("


@pytest.fixture(scope="module")
def bundle_folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("bundles") / "tiny"
    write_tiny(folder, SHAPE, golden_prompts=[list(b"def f(")], platforms=["cpu"])
    return folder


class Served(NamedTuple):
    """A server in a process of its own."""

    url: str
    process: Forked


@contextmanager
def served(folder: Path, mesh: str, work: Path, *flags: str) -> Iterator[Served]:
    """scripts/serve on a mesh; ready when it is given out, gone afterwards."""
    cache = str(work / "cache")
    arguments = [str(folder), "--mesh", mesh, "--port", "0", "--cache_dir", cache, *flags]
    process = Forked("spmd.scripts.serve_bundle", arguments, work / "server.log", {})
    try:
        wait_until(
            lambda: "ready:" in process.said or not process.process.is_alive(), lambda: process.said
        )
        assert "ready:" in process.said, process.said
        yield Served(re.findall(r"listening on (\S+),", process.said)[0], process)
    finally:
        process.kill()


def compiled(url: str) -> list[str]:
    """What the metrics say of programs that were compiled."""
    lines = get(f"{url}/metrics").text.splitlines()
    return [line for line in lines if line.startswith("spmd:compile_total")]


@pytest.mark.thorough
@pytest.mark.slow("it writes the bundle for all tests of this file, and starts a server")
def test_clients(bundle_folder: Path, tmp_path: Path) -> None:
    """Streams and whole answers agree, nothing is compiled for them, SIGTERM ends it gently."""
    openai = pytest.importorskip("openai")
    with served(bundle_folder, "data=2,model=4", tmp_path) as server:
        before = compiled(server.url)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE) as client:
            ask = {"model": "llama", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
            ask["model"] = client.models.list().data[0].id
            whole = client.completions.create(**ask)
            parts = list(client.completions.create(**ask, stream=True))
            assert "".join(part.choices[0].text for part in parts if part.choices) == (
                whole.choices[0].text
            )
            assert whole.usage.completion_tokens == 20
            chat = client.chat.completions.create(
                model=ask["model"], max_tokens=8, messages=[{"role": "user", "content": "hi"}],
                logprobs=True, top_logprobs=3, seed=1,
            )  # fmt: skip
            assert len(chat.choices[0].logprobs.content) >= 1
        assert compiled(server.url) == before != []
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0
        assert "1 golden prompts come out as they should" in server.process.said


@pytest.mark.thorough
def test_generate(bundle_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """The same texts for the same seed, errors in one line, and prompts asked for at a terminal."""
    flags = [
        str(bundle_folder), "--mesh=model=1", "--cache_dir", str(tmp_path), "--max_tokens=7",
        "--ignore_eos",
    ]  # fmt: skip

    def run(*more: str) -> tuple[str, str]:
        with contextlib.suppress(SystemExit):
            generate_text.main([*flags, *more])
        said = capsys.readouterr()
        return said.out, said.err

    out, err = run("--prompt=def f(", "--prompt=def f(", "--temperature=1.0", "--seed=3")
    first, second = out[: len(out) // 2], out[len(out) // 2 :]
    assert first == second
    assert first.startswith("def f(")
    assert "6 tokens read, 7 made in " in err
    lines = ["abc"]

    def typed(*_: Any) -> str:
        if not lines:
            raise EOFError
        return lines.pop()

    monkeypatch.setattr("rich.console.Console.input", typed)
    assert run()[0].startswith("abc")
    assert "1 tokens read, 7 made in " in run("--prompt=")[1]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--temperature=nan", "--temperature: a number from 0 to 100 is needed, not NaN"),
        ("--top_p=0", "--top_p: a number above 0 and up to 1 is needed, not 0.0"),
        ("--file=/no/such", "--file: /no/such: No such file or directory"),
        ("--file=/dev/null", "--file: /dev/null has no line with text"),
    ],
)
def test_generates_errors(flag: str, message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(SystemExit, match=message.replace("(", r"\(")):
        generate_text.main(["/no/such/bundle", "--prompt=x", flag])


def test_a_mesh_that_cannot_be_read(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        generate_text.main(["/no/such/bundle", "--prompt=x", "--mesh=model"])
    assert "--mesh: 'model' is not of the form axis=size" in capsys.readouterr().err
