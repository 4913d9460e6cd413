"""benchmarks/load_processes.py: several processes ask as one would."""

from __future__ import annotations

import pytest

from benchmarks.load_client import Load, make_asks
from benchmarks.load_processes import Clients
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, serving


@pytest.mark.parametrize("concurrency", [1, 8])
def test_processes_share_a_load(concurrency: int) -> None:
    load = Load(7, concurrency, words=(1, 3), tokens=(2, 20), ignore_eos=True)
    asks = make_asks(load)
    with serving(FakeBackend()) as live, Clients(live.url, MODEL, processes=3) as clients:
        asked = clients.start(load, asks).result()
        assert clients.done == 7
        live.wait_idle()
    assert [answer.ask for answer in asked.answers] == asks
    for answer, ask in zip(asked.answers, asks, strict=True):
        assert answer.outcome == "done", answer.problem
        assert answer.text == live.alone(ask.prompt, ask.max_tokens, ask.number)
    ends = [answer.began + answer.total for answer in asked.answers]
    assert asked.ended == max(ends)
    assert asked.seconds == max(ends) - min(answer.began for answer in asked.answers)
    assert asked.busy > 0
    if concurrency == 1:  # one after the other, however many processes there are
        starts = sorted(answer.began for answer in asked.answers)
        assert all(end <= start for end, start in zip(sorted(ends), starts[1:], strict=False))
