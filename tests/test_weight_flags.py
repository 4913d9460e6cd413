"""The flags of scripts/train_llama.py on models and weights: from a checkpoint to a checkpoint."""

import dataclasses
import functools
import io
import json

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from rich.console import Console

from models.llama import model
from models.llama.config import CONFIGS, ConfigError
from models.llama.weights import load as weights
from models.llama.weights.config import read_config
from scripts import weight_flags

TINY = CONFIGS["tiny"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with weights, a config and a tokenizer."""
    init = functools.partial(model.init, config=TINY)
    folder = tmp_path_factory.mktemp("flags") / "checkpoint"
    weights.save(jax.jit(init)(jax.random.key(2)), TINY, folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def model_flag(given=None):
    """The flag --model, as it is after parsing."""
    values = flags.FlagValues()
    flags.DEFINE_enum("model", "quickstart", sorted(CONFIGS), "", flag_values=values)
    values(["", *([f"--model={given}"] if given else [])])
    return values["model"]


def given(**values):
    """The flags set as on a command line."""
    return flagsaver.as_parsed(**{name: str(value) for name, value in values.items()})


@pytest.fixture(autouse=True)
def parsed():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def test_model_by_name():
    assert weight_flags.chosen_config(model_flag()) == CONFIGS["quickstart"]
    assert weight_flags.chosen_config(model_flag("tiny")) == TINY
    assert weight_flags.model_name(model_flag("tiny")) == "tiny"


def test_from_a_checkpoint_to_a_checkpoint(checkpoint, tmp_path):
    out = tmp_path / "out"
    printed = io.StringIO()
    console = Console(file=printed, soft_wrap=True)
    with given(init_from=checkpoint, export_hf=out, export_dtype="bfloat16"):
        config = weight_flags.chosen_config(model_flag())
        assert config == read_config(checkpoint)
        assert weight_flags.model_name(model_flag()) == "checkpoint"
        params = weight_flags.load_params(config, None, console)
        weight_flags.export_params(params, config, console)
    assert (out / "tokenizer.json").exists()
    assert printed.getvalue() == f"weights: {checkpoint}\nexported: {out}\n"
    again = weights.load(out, dataclasses.replace(config, param_dtype="bfloat16"))
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_array_equal(ours.astype("bfloat16"), theirs),
        params,
        again,
    )


def test_without_flags_nothing_is_read_or_written(tmp_path):
    assert weight_flags.load_params(TINY, None, Console()) is None
    weight_flags.export_params(None, TINY, Console())


def test_config_file(checkpoint, tmp_path):
    file = tmp_path / "config.json"
    values = json.loads((checkpoint / "config.json").read_text())
    file.write_text(json.dumps({**values, "num_hidden_layers": 5, "odd": 1}))
    with given(config=file), pytest.raises(ConfigError, match="--ignore_config_keys odd"):
        weight_flags.chosen_config(model_flag())
    with given(config=file, ignore_config_keys="odd"):
        assert weight_flags.chosen_config(model_flag()).num_hidden_layers == 5
        with pytest.raises(ConfigError, match="--config and --model both name a model"):
            weight_flags.chosen_config(model_flag("tiny"))


def test_what_cannot_work_is_said_before_training(checkpoint):
    with given(init_from=checkpoint), pytest.raises(weights.WeightsError, match="of another shape"):
        weight_flags.chosen_config(model_flag("quickstart"))
    with given(export_hf=checkpoint), pytest.raises(weights.WeightsError, match="exists already"):
        weight_flags.chosen_config(model_flag())
