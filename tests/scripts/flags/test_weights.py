"""The flags of scripts/train_llama.py on models and weights: from a checkpoint to a checkpoint."""

import dataclasses
import functools
import io
import json
import shutil
from pathlib import Path

import jax
import pytest
import tokenizers
from rich.console import Console
from safetensors.numpy import load_file

from spmd.models.llama import fresh
from spmd.models.llama.config import ConfigError
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.weights import load as weights
from spmd.models.training.data.tokenizer import ByteTokenizer, load_tokenizer, same_ids
from spmd.scripts.flags import weights as weights_flags
from spmd.scripts.flags.train import make_parser
from tests.models.training.data.test_beginnings import byte_level, saved

TINY = CONFIGS["tiny"]


def write_checkpoint(folder):
    """Random weights, a config, and a tokenizer of a few words."""
    init = functools.partial(fresh.init, config=TINY)
    weights.save(jax.jit(init)(jax.random.key(2)), TINY, folder)
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "to", "be", "or", "not"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="or"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags") / "checkpoint"
    write_checkpoint(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


PARSER = make_parser("")


def given(*flags):
    return PARSER.parse_args(flags)


def test_texts_begin_as_in_training(checkpoint, tmp_path):
    """The tokenizer of --init_from names a beginning; its own file does not put it there."""
    folder, out = tmp_path / "from", tmp_path / "out"
    shutil.copytree(checkpoint, folder)
    trained = load_tokenizer(str(saved(byte_level(), folder)))
    assert (trained.bos_id, trained.begins) == (0, ())
    flags = given(f"--init_from={folder}", f"--export_hf={out}", "--export_dtype=bfloat16")
    config = weights_flags.chosen_config(flags)
    params = weights_flags.load_params(flags, config, None, Console(file=io.StringIO()))
    weights_flags.export_params(flags, params, config, trained, Console(file=io.StringIO()))
    assert load_tokenizer(str(out)).begins == (0,)
    stored, made = (load_file(path / "model.safetensors") for path in (checkpoint, out))
    assert {name: x.astype("bfloat16").tobytes() for name, x in stored.items()} == {
        name: x.tobytes() for name, x in made.items()
    }
    assert (out / "tokenizer_config.json").read_bytes() == (
        folder / "tokenizer_config.json"
    ).read_bytes()


def test_model_by_name_and_without_flags_nothing_is_read_or_written():
    assert weights_flags.chosen_config(given()) == CONFIGS["quickstart"]
    assert weights_flags.chosen_config(given("--model=tiny")) == TINY
    assert weights_flags.model_name(given("--model=tiny")) == "tiny"
    assert weights_flags.model_name(given("--init_from=a/b")) == "b"
    assert weights_flags.load_params(given(), TINY, None, Console()) is None
    weights_flags.export_params(given(), None, TINY, ByteTokenizer(), Console())


def test_the_tokenizer_is_that_of_the_weights(checkpoint, tmp_path):
    init = f"--init_from={checkpoint}"
    assert weights_flags.chosen_tokenizer(given(init), TINY) == str(checkpoint)
    assert weights_flags.chosen_tokenizer(given(init, "--tokenizer=bytes"), TINY) == "bytes"
    assert weights_flags.chosen_tokenizer(given(), TINY) == "bytes"
    without = f"--init_from={tmp_path}"
    assert weights_flags.chosen_tokenizer(given(without), TINY) == "bytes"  # it knows 256 tokens
    larger = dataclasses.replace(TINY, vocab_size=300)
    with pytest.raises(weights.WeightsError, match=r"no tokenizer.json, and its model knows 300"):
        weights_flags.chosen_tokenizer(given(without), larger)


def test_an_export_ships_the_tokenizer_that_was_trained_with(checkpoint, tmp_path):
    """Of a folder with nothing but a tokenizer.json: that, and the names of its special tokens."""
    params = jax.jit(functools.partial(fresh.init, config=TINY))(jax.random.key(2))
    flags = [f"--init_from={checkpoint}"]
    own = tmp_path / "own" / "tokenizer.json"
    own.parent.mkdir()
    own.write_text((checkpoint / "tokenizer.json").read_text().replace('"not"', '"neither"'))
    printed = io.StringIO()
    console = Console(file=printed, soft_wrap=True)
    for name in (str(own), "bytes"):
        out = tmp_path / f"out-{Path(name).stem}"
        to = given(*flags, f"--export_hf={out}")
        weights_flags.export_params(to, params, TINY, load_tokenizer(name), console)
    shipped = load_tokenizer(str(tmp_path / "out-tokenizer"))
    assert same_ids(shipped, load_tokenizer(str(own)))
    assert shipped.begins == (0,)
    assert (shipped.eos_id, shipped.bos_id) == (1, 0)
    assert not list((tmp_path / "out-bytes").glob("tokenizer*"))
    assert "it has no tokenizer: the model was trained on bytes" in printed.getvalue()


def test_config_file(checkpoint, tmp_path):
    file = tmp_path / "config.json"
    values = json.loads((checkpoint / "config.json").read_text())
    file.write_text(json.dumps({**values, "num_hidden_layers": 5, "odd": 1}))
    with pytest.raises(ConfigError, match="--ignore_config_keys odd"):
        weights_flags.chosen_config(given(f"--config={file}"))
    known = (f"--config={file}", "--ignore_config_keys=odd")
    assert weights_flags.chosen_config(given(*known)).num_hidden_layers == 5
    with pytest.raises(ConfigError, match="--config and --model both name a model"):
        weights_flags.chosen_config(given(*known, "--model=tiny"))


def test_what_cannot_work_is_said_before_training(checkpoint):
    with pytest.raises(weights.WeightsError, match="of another shape"):
        weights_flags.chosen_config(given(f"--init_from={checkpoint}", "--model=quickstart"))
    with pytest.raises(weights.WeightsError, match="exists already"):
        weights_flags.chosen_config(given(f"--export_hf={checkpoint}"))
