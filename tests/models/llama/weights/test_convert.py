"""Checkpoints cut for n ranks, for m, and put together again: the same bits, the same logits."""

import dataclasses
import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd.models.llama.named import CONFIGS
from spmd.models.llama.weights import convert
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.convert import write_hf, write_ranks
from spmd.models.llama.weights.files import WeightsError
from spmd.models.llama.weights.ranks import cuts, rank_file, ranks_source
from spmd.models.llama.weights.sources import checkpoint_source, fresh_source, hf_source
from spmd.models.training.checkpoints.found import CheckpointError
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.run.loop import TrainState
from spmd.scripts import convert_checkpoints as script
from tests.forked import run_text
from tests.models.llama.layers import unstack_layers
from tests.models.llama.made import assert_close, fresh_params
from tests.models.llama.weights.checkpoints import tensors, with_random_biases

CONFIG = dataclasses.replace(
    CONFIGS["tiny"], num_attention_heads=8, num_key_value_heads=2, head_dim=8, scan_layers=False
)

EXPERTS = dataclasses.replace(
    CONFIG, model_type="mixtral", num_experts=4, num_experts_per_tok=2, scan_layers=True
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert") / "whole"
    with fresh_source(CONFIG, 0) as source:
        write_hf(source, folder, max_file_bytes=20_000)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def cut(whole, tmp_path_factory):
    """Number of ranks -> the checkpoint cut for them."""

    @functools.cache
    def make(ranks):
        folder = tmp_path_factory.mktemp("ranks") / f"ranks-{ranks}"
        with hf_source(whole) as source:
            write_ranks(source, folder, ranks)
        return folder

    return make


def same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize(
    ("n", "m"),
    [
        (2, 8),
        (8, 1),
        *(pytest.param(*pair, marks=pytest.mark.heavy) for pair in ((1, 2), (2, 4), (4, 2))),
    ],
)
def test_there_and_back_is_the_same_bits(n, m, whole, cut, tmp_path):
    with ranks_source(cut(n)) as source:
        write_ranks(source, tmp_path / "m", m)
    same_files(tmp_path / "m", cut(m))
    with ranks_source(tmp_path / "m") as source:
        write_ranks(source, tmp_path / "n", n)
        write_hf(source, tmp_path / "whole", max_file_bytes=20_000)
    same_files(tmp_path / "n", cut(n))
    same_files(tmp_path / "whole", whole)


def test_biases_and_norms_of_heads(tmp_path):
    """Biases are cut as the rows of their weights; that behind the sum over ranks is whole."""
    config = dataclasses.replace(CONFIG, model_type="qwen3", attention_bias="qkvo", qk_norm=True)
    weights.save(with_random_biases(fresh_params(config)), config, tmp_path / "whole")
    whole = tensors(tmp_path / "whole")
    with hf_source(tmp_path / "whole") as source:
        write_ranks(source, tmp_path / "ranks", 4)
    prefix = "model.layers.1.self_attn."
    for rank in range(4):
        found = load_file(tmp_path / "ranks" / rank_file(rank))
        for name, (piece, size) in {
            "q_proj.bias": (rank, 16), "k_proj.bias": (rank // 2, 8), "v_proj.bias": (rank // 2, 8),
            "o_proj.bias": (0, 32), "q_norm.weight": (0, 8), "k_norm.weight": (0, 8),
        }.items():  # fmt: skip
            wanted = whole[prefix + name][piece * size : (piece + 1) * size]
            assert np.any(wanted) and len(wanted) == size
            np.testing.assert_array_equal(found[prefix + name], wanted)
    with ranks_source(tmp_path / "ranks") as source:
        write_hf(source, tmp_path / "again")
    back = tensors(tmp_path / "again")
    assert set(back) == set(whole)
    for name, tensor in whole.items():
        np.testing.assert_array_equal(back[name], tensor)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w2"),
        pytest.param("qwen3_moe", "mlp.experts.3.down_proj", marks=pytest.mark.heavy),
    ],
)
def test_experts_are_tensors_of_their_own(model_type, names, tmp_path):
    """Each cut by its width; the router is whole."""
    qk_norm = model_type == "qwen3_moe"
    config = dataclasses.replace(EXPERTS, model_type=model_type, qk_norm=qk_norm, scan_layers=False)
    with fresh_source(config, 0) as source:
        write_hf(source, tmp_path / "whole")
    expected = fresh_params(config)
    close = functools.partial(assert_close, rtol=1e-5, atol=1e-7)
    for scan in (False, True):
        loaded = weights.load(tmp_path / "whole", dataclasses.replace(config, scan_layers=scan))
        close(unstack_layers(loaded) if scan else loaded, expected)
    with hf_source(tmp_path / "whole") as source:
        write_ranks(source, tmp_path / "ranks", 2)
        close(jax.tree.map(np.asarray, source.tree()), expected)
    last = load_file(tmp_path / "ranks" / rank_file(1))
    wanted = expected["layers"]["1"]["mlp"]["experts"]["down_proj"]["weight"][3, :, 32:]
    close(last[f"model.layers.1.{names}.weight"], wanted)
    assert last[f"model.layers.0.{names.split('.')[0]}.gate.weight"].shape == (4, 32)
    with ranks_source(tmp_path / "ranks") as source:
        write_hf(source, tmp_path / "again")
    same_files(tmp_path / "again", tmp_path / "whole")
    with pytest.raises(WeightsError, match="an MLP of 64 do not divide into 3 ranks"):
        cuts(config, 3)


def test_who_has_which_part(whole, cut):
    """What one product gives, the next one takes; four of eight ranks hold the same key head."""
    stored = tensors(whole)
    for rank in range(8):
        held = load_file(cut(8) / rank_file(rank))
        assert set(held) == set(stored)
        for name, tensor in held.items():
            part = name.split(".")[-2]
            pieces = 1 if "norm" in part else 2 if part in ("k_proj", "v_proj") else 8
            dim = 1 if part in ("o_proj", "down_proj") else 0
            wanted = np.split(stored[name], pieces, axis=dim)[rank * pieces // 8]
            np.testing.assert_array_equal(tensor, wanted, err_msg=name)
    content = json.loads((cut(8) / "sharding.json").read_text())
    assert content["mesh"] == {"model": 8}
    assert content["key_head_copies"] == 4
    assert content["tensors"]["model.layers.0.self_attn.k_proj.weight"]["spec"] == ["model", None]


def test_a_vocabulary_that_is_not_divided_stays_whole():
    assert cuts(dataclasses.replace(CONFIG, vocab_size=255), 4)["lm_head.weight"].dim is None
    assert cuts(CONFIG, 4)["lm_head.weight"].dim == 0


# From training


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        pytest.param(dataclasses.replace(CONFIG, scan_layers=True), marks=pytest.mark.heavy),
        EXPERTS,
    ],
)
def test_checkpoints_of_training(config, tmp_path, devices8):
    mesh = jax.sharding.Mesh(np.array(devices8), ("data",))
    params = jax.tree.map(lambda leaf: leaf, fresh_params(config, seed=1))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    params["embed_tokens"]["weight"] = jax.device_put(params["embed_tokens"]["weight"], split)
    about = {"config": {"model": dataclasses.asdict(config)}}
    with Checkpoints(tmp_path / "run" / "checkpoints", about=about) as checkpoints:
        checkpoints.save(TrainState(params, {"count": jnp.int32(3)}, 3))
    unfinished = tmp_path / "run" / "checkpoints" / "9.orbax-checkpoint-tmp-1"
    unfinished.mkdir()  # of a run that goes on meanwhile
    with checkpoint_source(tmp_path / "run") as source:
        write_ranks(source, tmp_path / "ranks", 2)
    assert unfinished.is_dir()
    with ranks_source(tmp_path / "ranks") as source:
        write_hf(source, tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "whole", config), params)
    script.main(["--from", f"{tmp_path}/run", "--out", f"{tmp_path}/other", "--mesh", "data=2"])
    with checkpoint_source(tmp_path / "other", "3") as source:
        table = np.asarray(source.tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(table, params["embed_tokens"]["weight"])
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; there are: 3"):
        checkpoint_source(tmp_path / "run", 4).__enter__()


# Going on


def test_a_run_that_was_stopped_goes_on_and_another_starts_anew(whole, cut, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    made: list[str] = []
    two, four = cut(2), cut(4)  # made before the function that writes is another one
    most, write_file = 2, convert._write_file

    def write(unfinished, name, *rest):
        if len(made) == most:
            raise Stopped
        made.append(name)
        write_file(unfinished, name, *rest)

    monkeypatch.setattr(convert, "_write_file", write)
    out = tmp_path / "out"
    with hf_source(whole) as source:
        with pytest.raises(Stopped):
            write_ranks(source, out, 4)
        most = 4
        assert not out.exists()
        (tmp_path / ".out.unfinished" / "rank-0003.safetensors.part").write_bytes(b"half")
        write_ranks(source, out, 4)
    assert made == [rank_file(rank) for rank in range(4)]
    same_files(out, four)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(out)
    made.clear()
    unfinished = tmp_path / ".out.unfinished"
    unfinished.mkdir()
    (unfinished / rank_file(0)).write_bytes(b"of something else")
    (unfinished / "progress.json").write_text(
        json.dumps({"identity": "other", "done": [rank_file(0)]})
    )
    with hf_source(whole) as source:
        write_ranks(source, tmp_path / "out", 2)
    assert made == [rank_file(0), rank_file(1)]
    same_files(tmp_path / "out", two)


PEAK = """
import sys, threading, time
from spmd.scripts import convert_checkpoints
import jax
jax.random.key(0)  # what jax itself needs is not counted
def held():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(lines["RssAnon"].split()[0]) // 1024
begin = peak = held()
def watch():
    global peak
    while True:
        peak = max(peak, held())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
convert_checkpoints.main(sys.argv[1:])
print("peak", peak - begin)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of 288 MiB."""
    folder = tmp_path_factory.mktemp("large") / "whole"
    config = dataclasses.replace(
        CONFIG, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=4096,
        num_attention_heads=8, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    block = np.random.default_rng(0).standard_normal((4096, 1024), np.float32)

    def read(index):
        return np.resize(block, [part.stop - part.start for part in index])

    with fresh_source(config, 0) as source:
        filled = {n: dataclasses.replace(t, read=read) for n, t in source.tensors.items()}
        write_hf(dataclasses.replace(source, tensors=filled), folder)
    assert (folder / "model.safetensors").stat().st_size > 288 << 20
    return folder


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
@pytest.mark.parametrize(("flag", "most"), [("--ranks=4", 48), ("--mesh=data=4,model=2", 192)])
def test_memory_is_bounded(flag, most, large, tmp_path):
    words = ["--from", f"{large}", "--out", f"{tmp_path}/out", flag]
    code, said = run_text(PEAK, words, tmp_path)
    assert code == 0, said
    assert int(said.split("peak ")[1]) <= most, said


# What cannot be done


@pytest.fixture
def spoilt(cut, tmp_path):
    return shutil.copytree(cut(8), tmp_path / "spoilt")


def test_errors(whole, cut, tmp_path, capsys):
    out = tmp_path / "out"
    fail = functools.partial(failure, capsys)
    assert "is no folder" in fail("--from", tmp_path / "no", "--out", out)
    message = fail("--from", whole, "--out", out, "--ranks", 3)
    assert "do not divide into 3 ranks; 1, 2, 4, 8 ranks are possible" in message
    assert "1, 2, 4, 8" in fail("--from", whole, "--out", out, "--ranks", 0)
    assert "exists already" in fail("--from", whole, "--out", cut(2), "--ranks", 2)
    assert "no folder of a training run" in fail("--from", whole, "--out", out, "--step", 3)
    assert "'x' is no number" in fail("--from", whole, "--out", out, "--step", "x")
    mesh = ("--from", whole, "--out", out, "--mesh", "data=2")
    assert "--mesh makes a training run's checkpoint, --ranks files" in fail(*mesh, "--ranks", 2)
    assert "--noscan say how --mesh lays" in fail("--from", whole, "--out", out, "--noscan")
    assert not list(tmp_path.iterdir())


def test_broken_ranks(spoilt, tmp_path, capsys):
    fail = functools.partial(failure, capsys, "--from", spoilt, "--out", tmp_path / "out")
    name = "model.layers.1.self_attn.v_proj.weight"
    held = load_file(spoilt / rank_file(2))
    save_file({**held, name: held[name] + 1}, spoilt / rank_file(2))
    assert f"ranks 0 and 2 should hold the same {name}, and differ" in fail()
    save_file({**held, name: held[name][:4]}, spoilt / rank_file(2))
    assert f"{name} is F32 [4, 32] and should be F32 [8, 32]" in fail()
    (spoilt / rank_file(2)).write_bytes(b"")
    assert "is missing, truncated or no safetensors" in fail()
    sharding = json.loads((spoilt / "sharding.json").read_text())
    (spoilt / "sharding.json").write_text(json.dumps({**sharding, "schema": 2}))
    assert "schema 2" in fail()
    (spoilt / "sharding.json").write_text("[]")
    assert "sharding.json cannot be used" in fail()


def test_two_at_once(whole, tmp_path, monkeypatch):
    out, write_file = tmp_path / "out", convert._write_file
    with hf_source(whole) as source:

        def write(*given):
            with pytest.raises(WeightsError, match="another process is writing"):
                write_ranks(source, out, 2)
            write_file(*given)

        monkeypatch.setattr(convert, "_write_file", write)
        write_ranks(source, out, 2)


def test_the_script(whole, cut, tmp_path, capsys):
    script.main(["--from", str(whole), "--out", str(tmp_path / "out"), "--ranks", "2"])
    assert "2 files" in capsys.readouterr().out
    same_files(tmp_path / "out", cut(2))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def failure(capsys, *arguments):
    """The one line in which it ends with these arguments."""
    with pytest.raises(SystemExit) as caught:
        script.main([*map(str, arguments)])
    capsys.readouterr()
    message = str(caught.value.code)
    assert message.startswith("error: ")
    assert "\n" not in message
    return message
