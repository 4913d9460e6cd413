"""benchmarks/serve.py against the fake, and against servers that cheat."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import serve
from benchmarks.load_client import (
    Answer,
    Ask,
    BenchError,
    Load,
    find_doubles,
    make_asks,
    parse_bounds,
    run_load,
)
from spmd.serving.http.limits import ServerOptions
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, Live, serving
from tests.waiting import PATIENCE

LOAD = Load(requests=40, concurrency=12, words=(1, 3), tokens=(1, 20))


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(FakeBackend(latency=0.001), ServerOptions(api_keys=("secret",))) as running:
        yield running


def answers_of(url: str, load: Load) -> list[Answer]:
    async def go() -> list[Answer]:
        headers = {"Authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE) as client:
            return await run_load(client, load, MODEL, make_asks(load))

    return asyncio.run(go())


def test_a_load(live: Live, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "numbers.json"
    serve.main([
        f"--url={live.url}", "--api_key=secret", "--requests=40", "--words=1,4", "--tokens=2,20",
        "--disconnect=0.3", "--verify=3", f"--json={path}",
    ])  # fmt: skip
    live.wait_idle()
    numbers = json.loads(path.read_text())
    assert numbers["done"] + numbers["left"] == numbers["requests"] == 40
    assert numbers["left"] > 3
    assert (numbers["verified"], numbers["same_alone"], numbers["failed"]) == (3, 3, 0)
    for name in ("first_token_ms", "between_tokens_ms", "whole_ms"):
        assert 0 < numbers[name]["p50"] <= numbers[name]["p90"] <= numbers[name]["p99"]
    said = capsys.readouterr().out
    assert "first token" in said and "tokens/s" in said and "3 of 3 the same when alone" in said


@pytest.mark.parametrize(("chat", "rate"), [(False, None), (True, 400.0)])
def test_every_answer_is_right(live: Live, chat: bool, rate: float | None) -> None:
    load = Load(**{**vars(LOAD), "chat": chat, "rate": rate, "ignore_eos": True})
    answers = answers_of(live.url, load)
    assert [answer.ask for answer in answers] == make_asks(load)
    for answer in answers:
        ask = answer.ask
        prompt = f"User: {ask.prompt}\n\nAssistant:" if chat else ask.prompt
        assert answer.outcome == "done", answer.problem
        assert answer.text == live.alone(prompt, ask.max_tokens, ask.number)
        assert answer.prompt_tokens == len(prompt)
        assert answer.first is not None and len(answer.between) == answer.tokens - 1
    assert find_doubles(answers) == []


def test_the_same_seed_asks_the_same() -> None:
    load = Load(requests=50, rate=10, disconnect=0.5)
    asks = make_asks(load)
    assert asks == make_asks(load) != make_asks(Load(**{**vars(load), "seed": 1}))
    assert len({ask.prompt for ask in asks}) == 50
    assert 3 < asks[-1].delay < 8
    assert 10 < sum(ask.leave_after is not None for ask in asks) < 40


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate=0", "--words=9,9"], "error: --rate: requests a second are more than 0"),
        ([], "error: http://127.0.0.1:9: ConnectError "),
    ],
)
def test_what_cannot_be_run(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        serve.main(["--url=http://127.0.0.1:9", *flags])
    assert str(stop.value.code).startswith(message)


@pytest.mark.parametrize("value", ["9,8", "a", "0,5", "1,2,3", ""])
def test_bounds_that_are_none(value: str) -> None:
    with pytest.raises(BenchError, match="--words: least and most are needed, as in 8,128, not"):
        parse_bounds("words", value.split(","))
    assert parse_bounds("words", ["7"]) == (7, 7)


# ---------------------------------------------------------------------------------------------
# Servers that cheat.


def event(**more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "a", "finish_reason": None}
    return {"id": "cmpl-{number}", "choices": [choice], "usage": None, **more}


def finish(reason: str = "length") -> dict[str, Any]:
    return event(choices=[{"index": 0, "text": "", "finish_reason": reason}])


def usage(tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": 3, "completion_tokens": tokens}
    return event(choices=[], usage=counts)


DONE = "[DONE]"


@contextmanager
def cheat(events: list[Any], status: int = 200) -> Iterator[str]:
    """A server that answers everything with the same events."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            number = json.loads(self.rfile.read(length))["seed"]
            texts = [one if isinstance(one, str) else json.dumps(one) for one in events]
            body = "".join(f"data: {text}\n\n" for text in texts)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.replace("{number}", str(number)).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([event(), event(), finish(), usage(2), DONE], ""),
        ([event(), event(), finish("stop"), usage(1), DONE], ""),
        ([event(), finish(), usage(1), DONE], "1 tokens instead of 2"),
        ([event(), event(), finish(), usage(3), DONE], "3 tokens instead of 2"),
        ([event(), event(), finish(), DONE], "no usage came"),
        ([event(), usage(2), DONE], "it ended because of None"),
        ([event(), event(), finish(), usage(2)], "the stream broke off"),
        ([event(), finish(), event(), usage(2), DONE], "more came after the end"),
        ([event(), {**event(), "id": "other"}, DONE], "answers are mixed up"),
        ([event(), {"error": {"message": "no more"}}, DONE], "no more"),
        (["{", DONE], "JSONDecodeError"),
        (["{}", DONE], "KeyError"),
    ],
)
def test_servers_that_cheat_are_caught(events: list[Any], problem: str) -> None:
    with cheat(events) as url:
        (answer,) = answers_of(url, Load(requests=1, tokens=(2, 2)))
    assert answer.outcome == ("failed" if problem else "done")
    assert problem in answer.problem


@pytest.mark.parametrize(
    ("status", "outcome"), [(429, "refused"), (503, "refused"), (500, "failed")]
)
def test_refusals(status: int, outcome: str) -> None:
    with cheat([], status) as url:
        (answer,) = answers_of(url, Load(requests=1))
    assert answer.outcome == outcome
    assert answer.problem.startswith(f"HTTP {status}")


def test_ids_that_come_twice() -> None:
    ask = Ask(0, "", 1, None, 0)
    assert find_doubles([Answer(ask, id=one) for one in ("a", "b", "a", "")]) == ["a"]
    same = [{**one, "id": "same"} for one in (event(), finish(), usage(1))]
    with cheat([*same, DONE]) as url, pytest.raises(SystemExit) as stop:
        serve.main([f"--url={url}", "--model=m", "--requests=2", "--tokens=1,1"])
    assert stop.value.code == "error: 1 ids belong to more than one answer, as same"
