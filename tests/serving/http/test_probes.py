"""Probes, while the server loads, serves, stalls, fails and drains."""

from __future__ import annotations

import functools
import threading

from serving.http.limits import Options
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import Live, get, post, serving
from tests.waiting import wait_until

ASK = {"prompt": "hello", "max_tokens": 4}


def statuses(live: Live) -> dict[str, int]:
    return {
        path: get(f"{live.url}/{path}").status_code
        for path in ("startupz", "livez", "readyz", "health")
    }


def test_while_it_loads_and_drains() -> None:
    with serving(load=False) as live:
        assert statuses(live) == {"startupz": 503, "livez": 200, "readyz": 503, "health": 503}
        assert get(f"{live.url}/startupz").text == "the model is still loading\n"
    with serving() as live:
        assert statuses(live) == {"startupz": 200, "livez": 200, "readyz": 200, "health": 200}
        live.service.drain()
        assert statuses(live) == {"startupz": 200, "livez": 200, "readyz": 503, "health": 503}


def test_when_a_call_hangs() -> None:
    backend = FakeBackend()
    backend.gate.close()
    with serving(backend, Options(stall_seconds=0.0)) as live:
        ask = functools.partial(post, f"{live.url}/v1/completions", json=ASK)
        thread = threading.Thread(target=ask)
        thread.start()
        sick = {"startupz": 200, "livez": 503, "readyz": 503, "health": 503}
        wait_until(lambda: statuses(live) == sick)
        assert "a call of the model has been under way" in get(f"{live.url}/livez").text
        backend.gate.open()
        thread.join()
        live.wait_idle()
        assert statuses(live)["livez"] == 200


def test_when_the_model_fails() -> None:
    with serving(FakeBackend(fail_after=0)) as live:
        assert post(f"{live.url}/v1/completions", json=ASK).status_code == 500
        assert statuses(live) == {"startupz": 200, "livez": 503, "readyz": 503, "health": 503}
        assert "the model failed" in get(f"{live.url}/livez").text
