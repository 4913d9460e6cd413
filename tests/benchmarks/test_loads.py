"""Loads on the project's server, with a tiny model: a process, several clients, a table."""

import pytest

from benchmarks import load_client, loads
from benchmarks.loads import Costs, Workload
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, serving

FLAGS = (
    "--loads=streams,long,one", "--scale=0.05", "--model=tiny", "--slots=4", "--max_length=64",
    "--page=16", "--rows=4,16", "--top_logprobs=2", "--client_processes=2", "--trace_seconds=0.01",
)  # fmt: skip
COSTS = Costs(slots=4, weight_bytes=1000, token_bytes=10, bandwidth=100, token_seconds=0.5)
WORKLOAD = Workload((load_client.Load(2, concurrency=2),))
TRACE = {"share": 0.925, "gaps": 3, "longest": 0.0021}


def answers(*outcomes: load_client.Outcome) -> list[load_client.Answer]:
    """Of one token each, asked one second after the other, each there after another two."""
    return [
        load_client.Answer(
            load_client.Ask(i, "", 1, None, 0), outcome, "why", began=float(i), total=2.0,
            first=0.5, prompt_tokens=3, tokens=1,
        )
        for i, outcome in enumerate(outcomes)
    ]  # fmt: skip


def test_a_row() -> None:
    numbers = loads.numbers_of(
        WORKLOAD, load_client.Asked(answers("done", "done"), 3.0, 0.9), TRACE, COSTS
    )
    assert loads.row("one", numbers) == (
        "| one | 2 | 3.00 | 1 | 2 | 500.0 / 500.0 / 500.0 |  | 92.5% | 100.0% |"
    )
    counted = {**numbers, "found_tokens": 1200, "preempted": 2}
    found = "one: 1,200 tokens of prompts were found in the cache, 2 requests preempted"
    assert loads.remarks("one", counted) == [
        found,
        "one: 3 gaps above 0.2 ms between kernels, the longest 2.1 ms",
        "one: a client's process computed 90% of the time, so it may be what was measured: use "
        "more --client_processes",
    ]
    assert loads.remarks("one", {**counted, "trace": None, "clients_busy": 0.5}) == [found]


@pytest.mark.parametrize(
    ("outcome", "message"),
    [("refused", "1 requests were refused: why"), ("failed", "1 of 2 requests failed; number 1")],
)
def test_every_answer_counts(outcome: load_client.Outcome, message: str) -> None:
    asked = load_client.Asked(answers("done", outcome), 3.0, 0.1)
    with pytest.raises(load_client.BenchError, match=message):
        loads.numbers_of(WORKLOAD, asked, None, COSTS)


@pytest.mark.thorough
@pytest.mark.parametrize("concurrency", [1, 8])
def test_processes_share_a_load(concurrency: int) -> None:
    load = load_client.Load(7, concurrency, words=(1, 3), tokens=(2, 20), ignore_eos=True)
    asks = load_client.make_asks(load)
    with serving(FakeBackend()) as live, load_client.client_pool(3) as pool:
        asked = load_client.ask_from(pool, 3, live.url, MODEL, load, asks)
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


@pytest.mark.thorough
def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    loads.main(FLAGS)
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        "| streams", "| one",
    ]  # fmt: skip
