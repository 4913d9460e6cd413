"""Weights as a run's first checkpoint: trained from as from the weights themselves, bit for bit."""

import dataclasses
import functools
import json
import shutil
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import spmd
from spmd.models.llama import sharding
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.program import LlamaProgram
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.convert import write_hf, write_ranks, write_run
from spmd.models.llama.weights.files import WeightsError
from spmd.models.llama.weights.ranks import ranks_source
from spmd.models.llama.weights.sources import fresh_source, hf_source
from spmd.models.training.checkpoints import pieces
from spmd.models.training.checkpoints.found import CheckpointError, find_saved
from spmd.models.training.checkpoints.pieces import chunks
from spmd.models.training.checkpoints.relayout import relayout
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.errors import RunError
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.description import RunConfig, check_same_model
from spmd.models.training.run.loop import TrainState
from spmd.models.training.run.optimizer import OptimizerConfig
from spmd.scripts import convert_checkpoints as script
from spmd.scripts import train_llama
from tests.forked import Forked, run_text
from tests.models.llama.made import structs
from tests.models.llama.weights.test_convert import failure
from tests.models.training.checkpoints.states import latest, stored_chunk
from tests.waiting import wait_until

CONFIG = dataclasses.replace(CONFIGS["tiny"], vocab_size=256, num_key_value_heads=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "whole"
    with fresh_source(CONFIG, 3) as source:
        write_hf(source.astype("bfloat16"), folder)
    return folder


@pytest.fixture(scope="module")
def trainer(whole):
    """One compiled step for all tests; parameters are float32."""
    run = RunConfig(
        model=dataclasses.replace(read_config(whole), param_dtype="float32"),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-2),
        options=TrainerOptions(steps=4),
        mesh={"data": 4, "model": 2},
        seq_len=16,
        global_batch=8,
    )
    tokens = jax.ShapeDtypeStruct((8, 16), np.int32)
    return LlamaProgram(run, spmd.make_mesh(**run.mesh), {"inputs": tokens, "targets": tokens})


def write(source, folder, mesh, dtype=None, **options):
    with source as opened:
        return write_run(opened.astype(dtype), folder, mesh, **options)


def restore(folder, targets):
    with Checkpoints(folder / "checkpoints") as checkpoints:
        found = latest(checkpoints)
        return found, checkpoints.restore(found, targets)


def one_step(trainer, state):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 17), np.int32)
    batch = trainer.place({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    return jax.device_get(trainer.step(state.params, state.opt_state, batch))


@pytest.fixture(scope="module")
def from_weights(whole, trainer):
    params = weights.load(whole, trainer.model, trainer.step.in_shardings[0])
    return one_step(trainer, trainer.fresh_state(params))


# Training from it


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "mesh", "options"),
    [
        pytest.param(0, {"data": 4, "model": 2}, {}, marks=pytest.mark.heavy),
        (0, {"data": 8}, {"scan_layers": False, "table": "fsdp"}),
        pytest.param(0, {"data": 1}, {"dtype": "float32"}, marks=pytest.mark.heavy),
        (4, {"data": 2, "model": 3}, {}),
    ],
)
def test_a_step_from_it_is_a_step_from_the_weights(
    ranks, mesh, options, whole, trainer, from_weights, tmp_path
):
    source = hf_source(whole)
    if ranks:
        with hf_source(whole) as opened:
            write_ranks(opened, tmp_path / "ranks", ranks)
        source = ranks_source(tmp_path / "ranks")
    made = write(source, tmp_path / "run", mesh, **options)
    assert made == tmp_path / "run" / "checkpoints" / "0"
    found, restored = restore(tmp_path / "run", trainer.targets())
    assert (found.step, found.has_optimizer, restored.opt_state) == (0, False, None)
    assert check_same_model(found.meta["config"], trainer.run) == []
    step = one_step(trainer, trainer.fresh_state(restored.params, found.step))
    jax.tree.map(np.testing.assert_array_equal, step, from_weights)


EXPERTS = {
    "model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "run", "pieces", "axes"),
    [
        # Rounded as when weights are loaded; the saved ones are wider here.
        ({}, {"param_dtype": "bfloat16", "scan_layers": False}, {"model": 2}, {"data": 4}),
        # Experts are read one by one.
        (EXPERTS, {}, {"data": 2, "expert": 2}, {"data": 2, "expert": 2}),
    ],
)
def test_parameters_are_those_that_are_loaded(model, run, pieces, axes, tmp_path, devices8):
    mesh = spmd.make_mesh(**axes, model=2, devices=devices8)
    saved = dataclasses.replace(CONFIG, **model)
    config = dataclasses.replace(saved, **run)
    with fresh_source(saved, 5) as source:
        write_hf(source, tmp_path / "whole")
        write_run(source, tmp_path / "run", pieces)
    targets = sharding.mark_params(structs(config), mesh, config)
    _, restored = restore(tmp_path / "run", TrainState(targets, {}))
    assert restored.params["norm"]["weight"].dtype == config.param_dtype
    loaded = weights.load(tmp_path / "whole", config)
    jax.tree.map(np.testing.assert_array_equal, restored.params, loaded)


def test_another_model_is_refused(whole, trainer, tmp_path):
    write(hf_source(whole), tmp_path / "run", {"data": 2})
    meta = find_saved(tmp_path / "run" / "checkpoints").meta
    other = dataclasses.replace(trainer.run.model, rope_theta=5e5)
    with pytest.raises(RunError, match=r"rope_theta is 10000\.0 there and 500000.0 here"):
        check_same_model(meta["config"], dataclasses.replace(trainer.run, model=other))


@pytest.mark.thorough
def test_the_script_resumes(whole, tmp_path, capsys, monkeypatch):
    """One device: what the flags make of it, and a checkpoint with optimizer state after it."""
    (tmp_path / "text").write_text("some text to learn from, over and over\n" * 100)
    script.main(["--from", f"{whole}", "--out", f"{tmp_path}/run", "--mesh", "data=1"])
    words = (
        f"--config {whole} --mesh data=1 --steps 1 --seq_len 16 --global_batch 2 --layers 2 "
        f"--data {tmp_path}/text --eval_batches 0 --sample_tokens 0 --run_dir {tmp_path}/run"
    ).split()
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)  # the script sets its own
    with pytest.raises(SystemExit) as refused:
        train_llama.main(words)
    assert "holds a run that has come to step 0; go on from there with --resume" in str(refused)
    with pytest.raises(SystemExit) as done:
        train_llama.main([*words, "--resume"])
    said = capsys.readouterr().out
    assert done.value.code == 0, said
    assert "resuming after step 0" in said
    assert "the checkpoint holds weights alone: the optimizer starts anew" in said
    assert "changed since the checkpoint" not in said
    found = find_saved(tmp_path / "run" / "checkpoints")
    assert (found.step, found.has_optimizer) == (1, True)


# Back, and on to other meshes


@pytest.mark.parametrize(
    "flags",
    [
        ("--noscan",),
        *(pytest.param(flags, marks=pytest.mark.heavy) for flags in ((), ("--sharding", "fsdp"))),
    ],
)
def test_back_is_the_same_bits(flags, whole, tmp_path):
    run, other, back = (str(tmp_path / name) for name in ("run", "other", "back"))
    script.main(["--from", str(whole), "--out", run, "--mesh", "data=4,model=2", *flags])
    script.main(["--from", run, "--out", other, "--mesh", "data=2"])
    for folder in (run, other):
        script.main(["--from", folder, "--out", back])
        assert held(Path(back)) == held(whole)
        assert read_config(back) == read_config(whole)
        shutil.rmtree(back)


def held(folder):
    """Name -> (dtype, bytes) of every tensor."""
    stored = load_file(folder / "model.safetensors")
    return {name: (tensor.dtype, tensor.tobytes()) for name, tensor in stored.items()}


def test_pieces_are_those_of_the_mesh_and_cover_an_array_once(whole, tmp_path):
    made = write(hf_source(whole), tmp_path / "run", {"data": 4, "model": 2})
    stored = functools.partial(stored_chunk, made)
    assert stored("params.embed_tokens.weight") == (256 // 2, CONFIG.hidden_size // 4)
    assert stored("params.layers.mlp.down_proj.weight") == (1, 32 // 4, 64 // 2)
    step = relayout(tmp_path / "run" / "checkpoints", tmp_path / "to", {"data": 8})
    assert stored_chunk(tmp_path / "to" / str(step), "params.embed_tokens.weight") == (256, 32 // 8)
    assert not find_saved(tmp_path / "to").has_optimizer
    array = np.zeros((5, 4, 1), np.int32)
    for index in chunks(array.shape, (2, 3, 4)):
        array[index] += 1
    assert (array == 1).all()
    assert [index for index in chunks((), ())] == [()]


def test_of_writes_that_fail_none_goes_on():
    """All are waited for, so that none writes into a folder that is being removed."""
    ended = []

    class Write:
        def __init__(self, error):
            self.error = error

        def exception(self):
            ended.append(self)
            return self.error

    writes = [Write(None), Write(OSError("first")), Write(OSError("second"))]
    with pytest.raises(OSError, match="first"):
        pieces._end(writes)
    assert ended == writes
    pieces._end(writes[:1])


# What cannot be done


def test_errors(whole, tmp_path, capsys):
    out = tmp_path / "out"
    fail = functools.partial(failure, capsys, "--from", whole, "--mesh", "data=2", "--out")
    assert "exists already; name a new or an empty folder" in fail(whole)
    assert "no axis is called 'rows'; the model splits over" in fail(out, "--mesh", "rows=2")
    assert "is no folder of a training run" in fail(out, "--step", 3)
    (tmp_path / "file").write_text("")
    assert "exists already" in fail(tmp_path / "file")
    assert f"{tmp_path}/file is no writable folder" in fail(tmp_path / "file" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    script.main(["--from", str(whole), "--mesh", "data=2", "--out", str(out)])
    assert "exists already" in fail(out)
    copy = functools.partial(failure, capsys, "--from", out, "--mesh", "data=2", "--out")
    assert "exists already" in copy(out)
    assert "--dtype, --sharding and --noscan do not go" in copy(tmp_path / "to", "--noscan")


def test_layers_of_different_dtypes_do_not_stack(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "mixed")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.input_layernorm.weight"
    save_file({**stored, name: stored[name].astype(np.float32)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="is bfloat16 and float32 in different ones; give --no"):
        write(hf_source(folder), tmp_path / "run", {"data": 1})
    made = write(hf_source(folder), tmp_path / "run", {"data": 1}, scan_layers=False)
    arrays = json.loads((made / "meta.json").read_text())["arrays"]
    found = {arrays[f"params/layers/{i}/input_layernorm/weight"]["dtype"] for i in (0, 1)}
    assert found == {"bfloat16", "float32"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WeightsError("f: embed cannot be read"), CheckpointError),
        (OSError(28, "No space left on device"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_is_half_written_is_removed(error, expected, whole, tmp_path):
    def read(index):
        raise error

    with hf_source(whole) as source:
        *_, last = source.tensors
        broken = {**source.tensors, last: dataclasses.replace(source.tensors[last], read=read)}
        with pytest.raises(expected) as raised:
            write_run(dataclasses.replace(source, tensors=broken), tmp_path / "run", {"data": 1})
    assert list(tmp_path.iterdir()) == []
    if expected is CheckpointError:
        assert f"{tmp_path}/run cannot be written: " in str(raised.value)


SLOW = """
import sys, time
from spmd.scripts import convert_checkpoints
print("ready", flush=True)
from spmd.models.training.checkpoints import pieces
write = pieces._write
def slow(*arguments):
    write(*arguments)
    print("wrote", flush=True)
    time.sleep(60)
pieces._write = slow
convert_checkpoints.main(sys.argv[1:])
"""


def test_killed_it_is_no_checkpoint(whole, tmp_path):
    script, out = tmp_path / "slow.py", tmp_path / "out"
    script.write_text(SLOW)
    out.mkdir()
    words = ["--from", f"{whole}", "--out", f"{out}/run", "--mesh", "data=1"]
    started = Forked(script, words, tmp_path / "said.txt", {})
    wait_until(lambda: "wrote\n" in started.said, lambda: started.said)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    (left,) = out.iterdir()
    assert left.name == f".run.unfinished-{started.process.pid}"
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        find_saved(left / "checkpoints")
    write(hf_source(whole), tmp_path / "run", {"data": 1})


NO_SPACE = """
import resource, signal, sys
from spmd.scripts import convert_checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))
convert_checkpoints.main(sys.argv[1:])
"""


def test_files_that_cannot_grow(whole, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    words = ["--from", f"{whole}", "--out", f"{out}/run", "--mesh", "data=4,model=2"]
    code, said = run_text(NO_SPACE, words, tmp_path)
    assert code == 1
    *_, line = said.splitlines()
    assert "Traceback" not in said
    assert line.startswith(f"error: {out}/run cannot be written: the checkpoint of step 0")
    assert "File too large" in line and "tensorstore_spec" not in line
    assert list(out.iterdir()) == []
