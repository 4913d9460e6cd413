"""A training run from flags or from a file: the same run, and what is said to bad ones."""

import argparse
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.models.llama.config import DTYPES
from spmd.models.llama.named import CONFIGS
from spmd.models.training.run.optimizer import OPTIMIZERS, SCHEDULES
from spmd.scripts import export_llama, serve_bundle, train_llama
from spmd.scripts.flags.run import make_run
from spmd.scripts.flags.train import make_parser
from tests.markdown import ROOT, blocks_of

BAD_FLAGS = {
    "--resume=auto": "--resume needs --run_dir, the folder that keeps what is written",
    "--mesh=rows=4": "no axis is called 'rows'; the model splits over replica, data, expert, seq,",
    "--steps=0": "steps must be positive, not 0",
    "--global_batch=6": "global_batch: 6 sequences do not divide over data=4; the next that do",
    "--remat=some": "remat 'some' is no policy; there are none, full, dots",
    "--remat=offload:q": "remat 'offload:q': on cpu devices there is no other memory",
    "--clip_norm=-1": "clip_norm must be positive, not -1.0",
    "--router_bias_rate=0.1": "here are 0 experts, softmax and param_dtype float32: set",
    "--router_bias_rate=0.1 --model=deepseek-v3 --lora=rank=2": "with lora adapters alone are",
    "--router_bias_rate=0.1 --model=deepseek-v3 --param_dtype=bfloat16": "dtype bfloat16: set it",
    "--report=/nowhere/r.html": "--report: the directory /nowhere does not exist",
}

PARSER = make_parser("")


@pytest.mark.parametrize("flag", BAD_FLAGS)
def test_bad_flags_are_one_clear_line(flag):
    with pytest.raises(ValueError, match=re.escape(BAD_FLAGS[flag])):
        make_run(PARSER.parse_args(flag.split()), "cpu")


def test_a_bare_resume_is_automatic():
    given = PARSER.parse_args(["--run_dir=r", "--resume", "--steps=7"])
    assert given.resume == "auto"
    assert make_run(given, "cpu").options.steps == 7
    assert PARSER.parse_args(["--run_dir=r", "--resume=12"]).resume == 12


def test_long_sequences_are_noticed():
    longer, same = (
        list(train_llama.notices(make_run(PARSER.parse_args([f"--seq_len={n}"]), "cpu")))
        for n in (4097, 4096)
    )
    assert longer == [
        "note: sequences of 4097 tokens are longer than the 4096 that the model is meant for "
        "(max_position_embeddings)"
    ]
    assert same == []


def test_help_shows_flags_in_their_groups():
    text = PARSER.format_help()
    assert "checkpoints:\n  --run_dir" in text
    assert "\n  --[no]scan " in text
    assert "; '' for nothing\n                          [jsonl,tensorboard]\n" in text
    assert "  --global_batch N        sequences of a step, on all devices [16]\n" in text


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


@given(WORDS, WORDS)
def test_the_command_line_overrides_a_file(tmp_path_factory, words, more):
    """A file and flags are as all of these as flags: the same run."""
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
