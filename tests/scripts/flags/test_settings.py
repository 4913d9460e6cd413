"""A training run from a file: the same as from the flags that it holds."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.llama.config import DTYPES
from models.llama.named import CONFIGS
from models.training.run.optimizer import OPTIMIZERS, SCHEDULES
from scripts import export_llama, serve_bundle
from scripts.flags.run import make_run
from scripts.flags.train import make_parser
from tests.markdown import ROOT, blocks_of

PARSER = make_parser("")

NUMBER = st.integers(0, 10**9).map(str)
FRACTION = st.floats(0, 1, exclude_max=True).map(repr)
NAME = st.text("abz./*: #'{[\\~@&!%é0\"", min_size=1)
VALUES = {
    "model": st.sampled_from(sorted(CONFIGS)),
    "layers": st.integers(1, 4).map(str),
    "dtype": st.sampled_from(DTYPES),
    "remat": st.sampled_from(["none", "full", "save:q,mlp_output"]),
    "mesh": st.sampled_from(["data=2", "data=1,model=8", "replica=2,data=2"]),
    "data": st.lists(NAME, max_size=3).map(",".join),
    "tokenizer": NAME,
    "seq_len": st.integers(1, 9000).map(str),
    "global_batch": st.integers(1, 9).map(lambda n: str(8 * n)),
    "steps": st.integers(1, 10**9).map(str),
    "optimizer": st.sampled_from(OPTIMIZERS),
    "learning_rate": st.floats(1e-12, 10).map(repr),
    "schedule": st.sampled_from(SCHEDULES),
    "beta1": FRACTION,
    "weight_decay": FRACTION,
    "clip_norm": FRACTION,
    "seed": NUMBER,
    "eval_every": NUMBER,
    "resume": st.sampled_from(["auto", "0", "12"]),
    "keep_every": NUMBER,
    "metrics": st.sampled_from(["", "jsonl", "tensorboard,jsonl"]),
    "profile": st.sampled_from(["1:1", "10:13"]),
    "watchdog_timeout": st.sampled_from(["0", "60", "1e3", "inf"]),
}
SWITCHES = st.lists(
    st.sampled_from(["--scan", "--noscan", "--eval_first", "--noeval_first", "--verbose"])
)
WORDS = st.builds(
    lambda values, switches: [*(f"--{k}={v}" for k, v in values.items()), *switches],
    st.fixed_dictionaries({"run_dir": NAME}, optional=VALUES),
    SWITCHES,
)


def from_file(text, folder, *more) -> argparse.Namespace:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return PARSER.parse_args([f"--settings={file}", *more])


@given(WORDS)
def test_flags_that_went_through_a_file_are_the_same_run(tmp_path_factory, words):
    flags = PARSER.parse_args(words)
    again = from_file(PARSER.settings_text(flags), tmp_path_factory.getbasetemp())
    assert vars(again) == {**vars(flags), "settings": again.settings}
    assert make_run(again, "cpu") == make_run(flags, "cpu")


@given(WORDS, WORDS)
def test_the_command_line_overrides_a_file(tmp_path_factory, words, more):
    """A file and flags are as all of these as flags."""
    file = PARSER.settings_text(PARSER.parse_args(words))
    both = from_file(file, tmp_path_factory.getbasetemp(), *more)
    assert vars(both) == {**vars(PARSER.parse_args([*words, *more])), "settings": both.settings}


def test_the_file_in_the_documentation(tmp_path):
    page = (ROOT / "docs/training.md").read_text()
    (block,) = (block for block in blocks_of(page) if block.language == "yaml")
    words = ["--model=llama3.2-1b", "--data=/corpus/a,/corpus/b", "--steps=10000", "--noscan"]
    words += ["--learning_rate=3e-4", "--save_every=500", "--resume"]
    again = from_file(block.text, tmp_path)
    assert vars(again) == {**vars(PARSER.parse_args(words)), "settings": again.settings}


def test_other_scripts_have_settings(tmp_path):
    file = tmp_path / "export.yaml"
    file.write_text("out: there\nrows: [1, 16]\nplatforms: [cpu]\nslots: 4\n")
    given_to_export = export_llama.make_parser().parse_args(["--settings", str(file), "--slots=8"])
    assert (given_to_export.rows, given_to_export.slots) == ((1, 16), 8)
    assert given_to_export.platforms == ("cpu",)
    file.write_text("port: 80\nmesh: {data: 1, model: 8}\napi_key: [a, b]\n")
    served = serve_bundle.make_parser().parse_args(["bundle", "--settings", str(file)])
    assert (served.port, served.api_key) == (80, ["a", "b"])
    assert served.mesh == {"data": 1, "model": 8}


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        (export_llama.make_parser(), ["--out=o", "--rows=1,16", "--tokenizer=a", "--length=32,64"]),
        (serve_bundle.make_parser(), ["bundle", "--api_key=a", "--allow_origins=https://b,c"]),
    ],
    ids=["export", "serve"],
)
def test_other_scripts_print_theirs(parser, words, tmp_path):
    flags = parser.parse_args(words)
    file = tmp_path / "printed.yaml"
    file.write_text(parser.settings_text(flags))
    again = parser.parse_args([*(word for word in words if word == "bundle"), f"--settings={file}"])
    assert vars(again) == {**vars(flags), "settings": again.settings}
