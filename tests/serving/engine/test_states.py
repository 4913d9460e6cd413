"""How the server stands: loading, full, draining, failed, hung; whom it lets in; who has left."""

import contextlib
import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from spmd.serving.http.limits import ServerOptions
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, Live, begin, get, serving
from tests.waiting import PATIENCE, wait_until


def post(
    live: Live, body: Any = None, path: str = "/v1/completions", **more: Any
) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 4} if body is None else body
    return httpx.post(f"{live.url}{path}", json=body, timeout=PATIENCE, **more)


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


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("draining", "the server is shutting down"),
        ("process_lost", "process 1 was lost: its connection closed"),
    ],
)
def test_what_is_not_finished_may_be_asked_for_elsewhere(code: str, why: str) -> None:
    """Who streams, who waits and who comes later learn why: a drain's end, or a lost process."""
    body = {"prompt": "hello", "max_tokens": 50}
    with serving(options=ServerOptions(drain_seconds=0.1)) as live, ThreadPoolExecutor() as threads:
        live.backend.gate.close(after=3)
        with stream(live, {**body, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            waiting = threads.submit(post, live, body)
            wait_until(lambda: sum(live.service.language().engine.state()[:2]) == 2)
            answers = []
            if code == "draining":
                live.server.handle_exit(signal.SIGTERM, None)
            else:
                live.service.lose(why)
                answers.append(post(live))
            rest = list(lines)
        answers.append(waiting.result())
        live.backend.gate.open()
    assert rest[-2] == "data: [DONE]"
    assert json.loads(rest[-4][6:])["error"] == {
        "message": why, "type": "service_unavailable_error", "param": None, "code": code,
    }  # fmt: skip
    for answer in answers:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["code"] == code
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
        assert statuses(live) == (200, 200, 200, 200)


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


def test_readers_that_go_away_free_their_slots() -> None:
    with serving() as live:
        engine = live.service.language().engine
        gate = live.backend.gate
        body = {"prompt": "hello", "max_tokens": 59, "n": 4, "seed": 0}
        # Behind a closed gate nothing would ever end by itself.
        gate.close()
        with begin(live, "/v1/completions", body):
            wait_until(lambda: sum(engine.state()[:2]) == 4)
        wait_until(lambda: engine.idle)
        gate.close(after=10)
        with stream(live, {**body, "stream": True}) as response:
            next(response.iter_lines())
        wait_until(lambda: engine.idle)
        gate.open()
        assert engine.state().counts.cancelled == 8
        numbers = get(f"{live.url}/metrics").text
        assert 'finished_reason="abort",model_name="fake-llama"} 8.0' in numbers
