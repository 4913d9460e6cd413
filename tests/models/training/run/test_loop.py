"""The loop of a run: what is taken, told, evaluated and saved when; rates of steps."""

import contextlib
import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.models.training.errors import TrainingError
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.loop import NAMES, Loop, TrainState
from spmd.models.training.run.metrics import StepCost, peak_flops
from spmd.models.training.run.profile import Profiler, ProfileRange
from tests.models.training.notes import Notes

COST = StepCost(tokens=100, devices=1)


def counting_step(params, opt_state, batch):
    params = params + batch
    metrics = {"loss": jnp.asarray(params, jnp.float32), "grad_norm": jnp.zeros(())}
    return params, opt_state, metrics


def skipping_step(params, opt_state, batch):
    """Adds the batch unless that is not finite."""
    good = np.isfinite(batch)
    metrics = {"loss": batch, "grad_norm": 0.0, "skipped": 0.0 if good else 1.0}
    return params + (batch if good else 0), opt_state, metrics


def mean(params):
    return {"loss": float(params)}


class Saver:
    """Keeps steps; a save has ended when it is asked the second time."""

    def __init__(self):
        self.saved, self.running, self.is_finished = [], None, False

    def save(self, state, notes):
        self.saved.append((state.step, int(state.params)))
        self.running = {"step": state.step, "save_seconds": 1.0, "save_stall_seconds": 0.0}

    def poll(self):
        ended, self.running = self.running, None
        return [ended] if ended else []

    def finish(self):
        self.is_finished = True


def run(step=counting_step, state=None, batches=None, *, steps, **options):
    names = {field.name for field in dataclasses.fields(TrainerOptions)} & options.keys()
    when = TrainerOptions(steps=steps, **{name: options.pop(name) for name in names})
    state = state or TrainState(0, None)
    notes = Notes()
    batches = itertools.count(state.step) if batches is None else iter(batches)
    return Loop(step, state, batches, when, cost=COST, sinks=[notes], **options).run(), notes


def test_records_are_of_their_own_step_also_of_a_resumed_run():
    outcome, notes = run(steps=5)
    assert outcome.state == TrainState(0 + 1 + 2 + 3 + 4, None, 5)
    assert [(record["step"], record["loss"]) for record in notes] == [
        (1, 0), (2, 1), (3, 3), (4, 6), (5, 10),
    ]  # fmt: skip
    half, _ = run(steps=3)
    resumed, notes = run(state=half.state, steps=5)
    whole, _ = run(steps=5)
    assert resumed.state == whole.state
    assert [record["step"] for record in notes] == [4, 5]


def test_numbers_are_read_one_step_late():
    """The host asks for a step's numbers when the next step is on its way."""
    events = []

    class Number:
        def __init__(self, step):
            self.step = step

        def __float__(self):
            events.append(f"read {self.step}")
            return 1.0

    def step(params, opt_state, batch):
        events.append(f"take {batch + 1}")
        return params, opt_state, {"loss": Number(batch + 1), "grad_norm": 0.0}

    run(step, steps=3, saver=Saver(), save_every=2)
    assert events == ["take 1", "take 2", "read 1", "read 2", "take 3", "read 3"]


def test_the_first_step_does_not_count_as_typical(monkeypatch):
    times = iter([0.0, 0.0, 60.0, 61.0, 64.0, 66.0, 66.0])
    monkeypatch.setattr("spmd.models.training.run.loop.time.perf_counter", lambda: next(times))
    outcome, notes = run(steps=4)
    assert [record["seconds"] for record in notes] == [60.0, 1.0, 3.0, 2.0]
    assert outcome.typical_seconds == 2.0


# Evaluations, checkpoints, stops


def test_evaluates_and_saves_on_time_and_at_the_end():
    saver = Saver()
    outcome, notes = run(steps=5, eval_every=2, save_every=3, evaluate=mean, saver=saver)
    evaluated = [(r["step"], r["eval_loss"]) for r in notes if "eval_loss" in r]
    assert evaluated == [(2, 1.0), (4, 6.0), (5, 10.0)]
    assert outcome.eval_loss == 10.0
    assert saver.saved == [(3, 3), (5, 10)]
    assert saver.is_finished
    assert [r["step"] for r in notes if "save_seconds" in r] == [3, 5]


@pytest.mark.parametrize(("stop", "saved"), [(4, [(4, 6)]), (0, [])])
def test_a_stop_saves_and_leaves_the_rest(stop, saved):
    """Before the first step there is nothing to save."""
    saver = Saver()
    outcome, notes = run(steps=9, saver=saver, evaluate=mean, should_stop=lambda s: s == stop)
    assert (outcome.is_stopped, outcome.state.step, saver.saved) == (True, stop, saved)
    assert outcome.eval_loss is None
    assert [record["step"] for record in notes if "loss" in record] == [*range(1, stop + 1)]


def test_a_stop_at_the_last_step_is_none_nothing_to_do_and_an_evaluation_before_all():
    outcome, _ = run(steps=3, should_stop=lambda step: step == 3)
    assert not outcome.is_stopped
    outcome, notes = run(steps=2, evaluate=mean, eval_first=True)
    assert [(r["step"], r["eval_loss"]) for r in notes if "eval_loss" in r] == [(0, 0), (2, 1)]
    assert outcome.state.step == 2
    saver = Saver()
    outcome, notes = run(
        state=TrainState(7, None, 3), steps=3, saver=saver, evaluate=lambda p: {"loss": 1.0}
    )
    assert outcome.state == TrainState(7, None, 3)
    assert (outcome.first, outcome.last, outcome.typical_seconds) == (None, None, None)
    assert (notes, saver.saved) == ([], [])


class Told(list):
    """What a watchdog is told."""

    doing = ""

    def beat(self, step=None, what=""):
        self.append(step)

    @contextlib.contextmanager
    def may_take(self, what, seconds=None):
        self.append(what)
        yield


def test_the_watchdog_hears_of_steps_and_of_what_takes_longer():
    told = Told()
    run(steps=4, watch=told, evaluate=mean, eval_every=2, saver=Saver(), save_every=3)
    assert told == [
        1, 2, "evaluating", 3, "saving", 4, "evaluating", "saving", "waiting for the last save",
    ]  # fmt: skip


def test_what_keeps_records_is_flushed_before_a_save():
    events = []

    class Sink(Notes):
        def flush(self):
            events.append(f"flush after {self[-1]['step']}")

    class Noting(Saver):
        def save(self, state, notes):
            events.append(f"save {state.step}")
            super().save(state, notes)

    Loop(
        counting_step, TrainState(0, None), itertools.count(),
        TrainerOptions(steps=2, save_every=1), cost=COST, sinks=[Sink()], saver=Noting(),
    ).run()  # fmt: skip
    assert events == ["flush after 1", "save 1", "flush after 2", "save 2"]


# What is not finite


@pytest.mark.parametrize(("key", "name"), NAMES.items())
@pytest.mark.parametrize(("begin", "broken", "saved"), [(0, 6, [2, 4]), (4, 5, []), (0, 1, [])])
def test_what_is_not_finite_ends_the_run_and_is_not_saved(key, name, begin, broken, saved):
    def step(params, opt_state, batch):
        return params, opt_state, {"loss": 1.0, key: np.nan if batch + 1 == broken else 1.0}

    saver, good = Saver(), (saved or [begin])[-1]
    end = f"may help; the last good state is the checkpoint of step {good}$" if good else "help$"
    with pytest.raises(TrainingError, match=f"the {name} of step {broken} is nan; .*{end}"):
        run(step, TrainState(0, None, begin), steps=9, save_every=2, saver=saver)
    assert [number for number, _ in saver.saved] == saved


def test_skipped_steps_are_counted_and_too_many_in_a_row_end_the_run():
    nan = float("nan")
    outcome, notes = run(
        skipping_step, batches=[1.0, nan, nan, 2.0, nan, 3.0], steps=6, max_skipped=2
    )
    assert outcome.state.params == 6.0
    assert outcome.skipped == 3
    assert [record["skipped"] for record in notes] == [0, 1, 1, 0, 1, 0]
    with pytest.raises(TrainingError, match="step 4 is nan, and so it was in the 2 steps before"):
        run(skipping_step, batches=[1.0, nan, nan, nan, 1.0], steps=5, max_skipped=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("spec", "named"), [(P(), [5]), (P(None, "b"), [5]), (P("a"), [4, 5])])
def test_a_flipped_bit_of_a_copy_is_found_and_its_device_named(devices8, spec, named, dtype):
    mesh = jax.sharding.Mesh(np.array(devices8).reshape(4, 2), ("a", "b"))
    array = jax.device_put(np.ones((8, 4), dtype), NamedSharding(mesh, spec))
    state = {"key": jax.device_put(jax.random.key(0), NamedSharding(mesh, P())), "w": array}
    run(lambda *_: (state, None, {"loss": 1.0}), steps=2, audit_every=1)
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[5].view(np.uint8)[-1, -1] ^= 0x80
    arrays = [jax.device_put(*pair) for pair in zip(parts, devices8, strict=True)]
    state["w"] = jax.make_array_from_single_device_arrays((8, 4), array.sharding, arrays)
    who = ", ".join(str(devices8[number]) for number in named)
    with pytest.raises(TrainingError, match=f"after step 2 .* params/w, and {who} another one"):
        run(lambda *_: (state, None, {"loss": 1.0}), steps=9, audit_every=2)


# Traces


def test_a_trace_of_some_steps(tmp_path: Path):
    run(jax.jit(counting_step), steps=4, profiler=Profiler(ProfileRange.parse("2:3"), tmp_path))
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("10", "first:last"), ("a:b", "first:last"), ("0:3", "no step"), ("5:4", "no step")],
)
def test_bad_ranges_of_steps(text, message):
    with pytest.raises(ValueError, match=message):
        ProfileRange.parse(text)


PEAKS = {
    "NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-40GB": 312e12,
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12, "cpu": None,
}  # fmt: skip


def test_peaks_and_rates():
    assert {kind: peak_flops(kind, "bfloat16") for kind in PEAKS} == PEAKS
    assert peak_flops("NVIDIA H200", "float32") is None
    cost = StepCost(
        tokens=1000, devices=4, flops_per_token={"causal": 6.0, "palm": 8.0}, peak_flops=3000.0
    )
    assert cost.rates(0.5) == {"tokens_per_s": 2000.0, "mfu_causal": 1.0, "mfu_palm": 8 / 6}
    assert dataclasses.replace(cost, peak_flops=None).rates(0.5) == {"tokens_per_s": 2000.0}
