"""Where requests' time went: phases and steps that add up, reasons, who may look, the page."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from spmd.serving.engine.records import Finished, StepRecord
from spmd.serving.http.limits import ServerOptions
from spmd.serving.http.logs import HttpExchange
from spmd.serving.http.timeline import PHASES, TO_FIRST_TOKEN, tell
from tests.explain.browser import Browser, find_browser
from tests.serving.engine.fake_backend import LIMITS, FakeBackend
from tests.serving.http.live import MODEL, Live, begin, get, post, serving
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """Two requests have run side by side, one of them as a stream of two completions."""
    backend = FakeBackend(dataclasses.replace(LIMITS, page=64, pages=16))  # pages hold no prompts
    backend.gate.close()
    with serving(backend) as running, contextlib.ExitStack() as clients:
        entries = running.service.language().engine._entries
        for i, more in enumerate(({}, {"n": 2, "stream": True})):
            body = {"prompt": f"{i}" * (12 + i), "max_tokens": 9, "seed": i, **more}
            clients.enter_context(begin(running, "/v1/completions", body))
            wait_until(functools.partial(lambda count: len(entries) == count, (1, 3)[i]))
        backend.gate.open()
        wait_until(lambda: len(running.service.traffic.completed) == 2)
        yield running


def asked(live: Live, query: str = "") -> Any:
    return get(f"{live.url}/requests?format=json{query}").json()["requests"]


def test_phases_steps_and_metrics_add_up(live: Live) -> None:
    every, mixed = asked(live), False
    names = {one["request_id"] for one in every}
    for one in (one for name in names for one in asked(live, f"&id={name}")):
        ends = [0.0, *(end for _, end in one["phases"].values())]
        assert [start for start, _ in one["phases"].values()] == ends[:-1] == sorted(ends[:-1])
        assert [*one["phases"]] == [name for name in PHASES if name in one["phases"]]
        start, end = one["phases"].get("send", (0.0, 0.0))
        assert one["index"] or (end > start) == (one["prompt_tokens"] == 13)  # it is a stream
        assert sum(step["own_rows"] for step in one["steps"]) == one["prompt_tokens"]
        mixed |= any(step["prompts_rows"] and step["drawing_rows"] for step in one["steps"])
        pairs = [*itertools.pairwise(one["gaps"])]
        assert len(pairs) == one["completion_tokens"] - 2 == 7
        assert all(before["end"] == gap["start"] <= gap["end"] for before, gap in pairs)
    assert mixed and get(f"{live.url}/requests?format=xml").status_code == 400
    total = live.service.traffic.registry.get_sample_value
    name, label = "spmd:first_token_part_seconds_sum", {"model_name": MODEL}
    parts = [total(name, {**label, "part": part}) or 0.0 for part in TO_FIRST_TOKEN]
    assert sum(parts) == pytest.approx(sum(one["first_token_seconds"] for one in every))
    assert total("spmd:step_rows_total", label) == live.backend.run


@pytest.mark.parametrize(
    ("reason", "begun", "done", "gap", "chunks"),
    [
        ("prompts", 0.4, 1.4, 0.0, {7: (8, True)}), ("long", 0.4, 1.4, 0.0, {}),
        ("preempted", 1.3, 1.4, 0.0, {1: (8, True)}), ("text", 0.4, 0.5, 0.0, {}),
        ("mask", 1.3, 1.4, 0.9, {}), ("drafts", 1.3, 1.4, 0.0, {}), ("host", 1.3, 1.4, 0.9, {}),
    ],
)  # fmt: skip
def test_why_late(reason: str, begun: float, done: float, gap: float, chunks: Any) -> None:
    ends = [0.1, 0.2, 0.3, 0.4, 1.4, 1.5]
    steps = [StepRecord(t - 0.1, t, 0.0, 0.0, 2, 0, 9, (1, 7), {}, t) for t in ends]
    steps[4] = StepRecord(begun, done, 0.0, gap, 9, 0, 9, (1, 7), chunks, 1.4)
    exchange = HttpExchange("a", "POST", "/v1/completions", "", started=0.0, ended=1.6)
    record = Finished(0, "length", 3, 6, 0.0, 0.1, 1.4, 1.5, 1.5, 0.02, 0.01, reason == "mask")
    told = tell(exchange, record, 1, steps)
    assert [gap["late"] for gap in told["gaps"]] == [None, None, None, reason, None]
    ends = [told["phases"][name][1] for name in ("prompt", "step", "text")]
    assert ends == pytest.approx([0.07, 0.09, 0.1])


def test_a_key_sees_its_own_requests() -> None:
    with serving(options=ServerOptions(api_keys=("one", "two"))) as live:
        body = {"prompt": "hello", "max_tokens": 2}
        headers = {"Authorization": "Bearer two", "X-Request-Id": "a/b"}
        post(f"{live.url}/v1/completions", json=body, headers=headers)
        for key, status in ((None, 401), ("three", 401), ("one", 404), ("two", 200)):
            answer = get(f"{live.url}/requests?id=a/b", auth=key and ("", key))
            assert answer.status_code == status
            assert answer.headers.get("WWW-Authenticate", "Basic").startswith("Basic")
        assert post(f"{live.url}/v1/completions", json=body, auth=("", "two")).status_code == 401


@pytest.mark.skipif(find_browser() is None, reason="no Chromium: apt-get install chromium")
def test_the_page_in_a_browser(live: Live, tmp_path: Any) -> None:
    with Browser(find_browser() or "", tmp_path) as page:
        page.call("Page.navigate", url=f"{live.url}/requests")
        wait_until(lambda: page.run("document.querySelectorAll('table a').length") == 3)
        page.run("document.querySelector('table a').click()")
        wait_until(lambda: page.run("document.querySelectorAll('svg.chart').length") == 4)
        fill = page.run("getComputedStyle(document.querySelector('rect.own')).fill")
        assert fill == "rgb(63, 118, 216)"  # the policy lets the style through
        assert {url.partition(live.url)[0] for url in page.requests} <= {""}
