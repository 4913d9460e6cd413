"""`spmd plan --serve`: simulated loads, how many machines they take, steps that are planned."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd.cli.main import main
from spmd.errors import ArgumentError
from spmd.serving import planned, simulated
from spmd.serving.engine.backend import Limits
from spmd.serving.simulated import LOADS, OfferedLoad, SimulatedLoad, StepTimes, read_load, simulate

LIMITS = Limits(
    slots=16, max_length=512, rows=(1, 16, 64, 256), groups=2, page=16, pages=400,
    top_logprobs=0, vocab_size=100,
)  # fmt: skip
SECONDS = {1: 4e-3, 16: 4e-3, 64: 5e-3, 256: 12e-3}
TIMES = StepTimes(SECONDS, SECONDS, read=1e-7, pair=1e-9)
CLIENTS = "prompt=20-200,answer=5-40,at_once=24,requests=96"
RATE = "prompt=20-200,answer=5-40,rate=50,requests=150"


def rate(load: OfferedLoad, machines: int = 1, times: StepTimes = TIMES) -> float:
    found = simulate(load, LIMITS, times, machines)
    return found.tokens / found.seconds


@pytest.mark.parametrize("text", [CLIENTS, RATE])
@pytest.mark.parametrize("machines", [1, 3, 40])
def test_every_token_is_drawn_once_and_again_the_same(text: str, machines: int):
    load = read_load(text)
    found = simulate(load, LIMITS, TIMES, machines)
    assert found.tokens == sum(one.answer for one in load.requests)
    assert len(found.first) == len(load.requests)
    assert len(found.gaps) == found.tokens - len(found.first)
    assert min(found.first) > SECONDS[1] and min(found.gaps) > 0
    assert found == simulate(read_load(text), LIMITS, TIMES, machines)


def test_a_stream_alone_takes_the_time_of_its_steps():
    load = read_load("prompt=16,answer=101,at_once=1,requests=1")
    p50, _, gap, _ = simulate(load, LIMITS, StepTimes(SECONDS, SECONDS, 1e-6, 0.0)).figures()
    assert 0 <= gap - (4.0 + (16 + 50) * 1e-3) < 1  # attention, and the host between two steps
    assert 14 < p50 < 18


@pytest.mark.parametrize("text", [CLIENTS, RATE])
def test_more_machines_and_faster_steps_are_never_slower(text: str):
    load = read_load(text)
    rates = [rate(load, machines) for machines in (1, 2, 4, 8)]
    assert all(b >= 0.99 * a for a, b in itertools.pairwise(rates))
    slow = {rows: 3 * seconds for rows, seconds in SECONDS.items()}
    assert rate(load, times=StepTimes(slow, slow, 1e-7, 1e-9)) < rates[0]


def test_pages_in_common_are_run_once_and_read_faster():
    texts = ("common=192,prompt=8,answer=20,at_once=8", "prompt=200,answer=20,at_once=8")
    shared, apart = (rate(read_load(text)) for text in texts)
    assert shared > 1.1 * apart


def test_texts_that_repeat_themselves_are_drawn_faster_with_drafts():
    load = OfferedLoad([simulated.ClientRequest((1, 2, 3) * 9, 120, text=(1, 2, 3) * 40)] * 8, 8)
    found, plain = (simulate(load, dataclasses.replace(LIMITS, drafts=n), TIMES) for n in (7, 0))
    assert found.tokens == plain.tokens == 8 * 120
    assert found.accepted > 0.8 * found.drafted > 300 and found.seconds < 0.85 * plain.seconds


def within(most: float) -> Callable[[SimulatedLoad], bool]:
    """Whether the p99 of the first token is."""
    return lambda seen: seen.figures()[1] <= most


def test_targets_decide_how_many_machines_there_are():
    load, found = read_load("prompt=100,answer=20,rate=400,requests=300"), []
    for most in (5000.0, 500.0, 30.0):
        serve = functools.partial(simulate, load, LIMITS, TIMES)
        count, seen, is_enough = planned.fewest_machines(serve, within(most))
        assert is_enough and seen.figures()[1] <= most
        assert count == 1 or serve(count - 1).figures()[1] > most
        found.append(count)
    assert found[0] < found[1] < found[2]
    assert planned.fewest_machines(serve, within(0))[::2] == (1, False)


def test_a_servers_own_log_is_a_load(tmp_path: Path):
    ended = {"time": "2026-11-27T10:00:05.500+00:00", "seconds": 2.5, "logger": "serving"}
    lines = [
        {**ended, "prompt_tokens": 30, "completion_tokens": 7},
        {**ended, "seconds": 4.0, "prompt_tokens": 20, "completion_tokens": 3},
        {"message": "a line about something else"},
    ]
    log = tmp_path / "requests.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    requests = read_load(str(log)).requests
    assert [(len(r.prompt), r.answer, r.at) for r in requests] == [(20, 3, 0.0), (30, 7, 1.5)]
    log.write_text('{"prompt_tokens": 30}')
    with pytest.raises(ArgumentError, match="line 1"):
        read_load(str(log))


@pytest.mark.parametrize("text", ["", "wild", "prompt=5,answer=5", "prompt=9-3,answer=1,rate=1"])
def test_what_is_no_traffic_is_said(text: str):
    with pytest.raises(ArgumentError, match="no traffic"):
        read_load(text)
    assert all(read_load(name).requests for name in LOADS)


def test_the_command_plans_meshes_and_says_the_best(capsys: pytest.CaptureFixture[str]):
    flags = ["h200:2", "--traffic", "prompt=40,answer=9,at_once=4", "--price", "h200=3"]
    assert main(["plan", "--serve", "tiny", *flags]) == 0
    out = capsys.readouterr().out
    assert "data=1, model=2" in out and "data=2, model=1" in out and "met" in out
    assert "best: export_llama --slots 16" in out
    assert main(["plan", "--serve", "tiny", *flags, "--first_token", "0.1"]) == 1
    assert "missed" in capsys.readouterr().out
    assert main(["plan", "--serve", "tiny", *flags, "--model_axis", "3"]) == 1
    assert "cannot be served" in capsys.readouterr().err
    assert main(["plan", "--serve", "tiny", "h200:2", "--traffic", "wild"]) == 2
    with pytest.raises(SystemExit):
        main(["plan", "--serve", "tiny", "h200:2", "--quantize", "int9"])
    assert "'int9' is not among none, int8" in capsys.readouterr().err
