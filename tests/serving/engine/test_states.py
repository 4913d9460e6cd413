"""How the server stands: loading, full, draining, failed, hung; whom it lets in; who has left."""

import asyncio
import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from spmd.serving.http.limits import ServerOptions
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, Live, get, serving
from tests.waiting import PATIENCE, wait_until


def post(live: Live, body: Any = None, **more: Any) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 4} if body is None else body
    return httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE, **more)


def stream(live: Live, body: Any) -> contextlib.AbstractContextManager[httpx.Response]:
    return httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=PATIENCE)


def statuses(live: Live) -> tuple[int, ...]:
    """What probes get: whether it has started, lives, is ready; and of its health."""
    paths = ("startupz", "livez", "readyz", "health")
    return tuple(get(f"{live.url}/{path}").status_code for path in paths)


def test_loading() -> None:
    with serving(load=False) as live:
        assert statuses(live) == (503, 200, 503, 503)
        for path in ("health", "startupz"):
            assert get(f"{live.url}/{path}").text == "the model is still loading\n"
        response = post(live)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.json()["error"]["code"] == "loading"
        assert get(f"{live.url}/v2/health/live").json() == {"live": True}
        assert get(f"{live.url}/v2/health/ready").status_code == 503
        assert get(f"{live.url}/metrics").status_code == 200


def test_draining() -> None:
    with serving() as live:
        wait_until(lambda: statuses(live) == (200, 200, 200, 200))
        live.backend.gate.close(after=3)
        body = {"prompt": "hello", "max_tokens": 40, "stream": True, "seed": 0}
        with stream(live, body) as response:
            lines = response.iter_lines()
            text = next(lines)
            live.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: live.service.status == "draining")
            assert statuses(live) == (200, 200, 503, 503)
            refusal = post(live)
            assert refusal.status_code == 503
            assert refusal.headers["retry-after"] == "5"
            live.backend.gate.open()
            text += "".join(f"{line}\n" for line in lines)
        got = [json.loads(part) for part in re.findall(r"data: (\{.*\})", text)]
        assert "".join(c["choices"][0]["text"] for c in got) == live.alone("hello", 40)
        wait_until(lambda: live.server.should_exit)


@contextlib.contextmanager
def one_streams_and_one_waits(live: Live) -> Iterator[tuple[Iterator[str], list[httpx.Response]]]:
    """The rest of a stream, and what becomes of a whole answer; the model goes on behind it."""
    live.backend.gate.close(after=3)
    body = {"prompt": "hello", "max_tokens": 50}
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(live, body)))
    with stream(live, {**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        thread.start()
        wait_until(lambda: sum(live.service.language().engine.state()[:2]) == 2)
        yield lines, answers
    thread.join()
    live.backend.gate.open()


def test_draining_has_an_end() -> None:
    """Behind it, what is not finished may be asked for elsewhere."""
    options = ServerOptions(drain_seconds=0.1)
    with serving(options=options) as live, one_streams_and_one_waits(live) as (lines, answers):
        live.server.handle_exit(signal.SIGTERM, None)
        rest = list(lines)
    error = json.loads(rest[-4][6:])["error"]
    assert error["message"] == "the server is shutting down"
    assert (error["type"], error["code"]) == ("service_unavailable_error", "draining")
    assert rest[-2] == "data: [DONE]"
    assert (answers[0].status_code, answers[0].headers["retry-after"]) == (503, "5")


def test_when_a_process_of_several_is_lost() -> None:
    """Who streams, who waits and who comes later learn that it is not the model, nor a drain."""
    why = "process 1 was lost: its connection closed"
    with serving() as live, one_streams_and_one_waits(live) as (lines, answers):
        live.service.lose(why)
        answers.append(post(live))
        rest = list(lines)
    assert json.loads(rest[-4][6:])["error"] == {
        "message": why, "type": "service_unavailable_error", "param": None, "code": "process_lost",
    }  # fmt: skip
    assert len(answers) == 2
    for answer in answers:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["code"] == "process_lost"
        assert answer.json()["error"]["message"].endswith(why)


def test_a_model_that_fails() -> None:
    with serving(FakeBackend(fail_after=3)) as live:
        response = post(live, {"prompt": "hello", "max_tokens": 50})
        assert response.status_code == 500
        message = response.json()["error"]["message"]
        assert message == "the model failed: RuntimeError: the device is gone"
        assert post(live).status_code == 500
        assert statuses(live) == (200, 503, 503, 503)
        assert {get(f"{live.url}/{path}").text for path in ("livez", "health")} == {f"{message}\n"}


def test_a_model_that_hangs() -> None:
    with serving(options=ServerOptions(stall_seconds=0.1)) as live:
        live.backend.gate.close()
        thread = threading.Thread(target=post, args=(live, {"prompt": "a", "max_tokens": 1}))
        thread.start()
        wait_until(lambda: statuses(live) == (200, 503, 503, 503))
        assert "a call of the model has been under way" in get(f"{live.url}/livez").text
        live.backend.gate.open()
        thread.join()
        wait_until(lambda: statuses(live) == (200, 200, 200, 200))


def test_keys() -> None:
    with serving(options=ServerOptions(api_keys=("sésame", "other"))) as live:
        for headers in (
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic other"},
            {"Authorization": "Bearer other other"}, {"Authorization": "Bearer"},
        ):  # fmt: skip
            response = post(live, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert get(f"{live.url}/v1/models").status_code == 401
        url = f"{live.url}/v2/models/{MODEL}"
        assert get(url).status_code == httpx.post(f"{url}/infer").status_code == 401
        assert get(f"{live.url}/health").status_code == 200
        for key in (b"other", "sésame".encode()):
            assert post(live, headers={"Authorization": b"Bearer " + key}).status_code == 200


async def leave(url: str, body: Any, asked: Callable[[], bool]) -> None:
    """Asks, and goes away once the request has come."""
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = asyncio.create_task(client.post(url, json=body))
        await asyncio.to_thread(wait_until, asked)
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answer


def test_readers_that_go_away_free_their_slots() -> None:
    with serving() as live:
        engine = live.service.language().engine
        gate = live.backend.gate
        url = f"{live.url}/v1/completions"
        body = {"prompt": "hello", "max_tokens": 59, "n": 4, "seed": 0}
        # Behind a closed gate nothing would ever end by itself.
        gate.close()
        asyncio.run(leave(url, body, lambda: sum(engine.state()[:2]) == 4))
        wait_until(lambda: engine.idle)
        gate.close(after=10)
        with stream(live, {**body, "stream": True}) as response:
            next(response.iter_lines())
        wait_until(lambda: engine.idle)
        gate.open()
        wait_until(lambda: engine.state().counts.cancelled == 8)
        numbers = get(f"{live.url}/metrics").text
        assert 'finished_reason="abort",model_name="fake-llama"} 8.0' in numbers
