"""The flags of a training run: what they mean, and what is said to bad ones."""

import re

import pytest

from scripts import train_llama
from scripts.flags.run import make_run
from scripts.flags.train import make_parser

BAD_FLAGS = {
    "--resume=auto": "--resume needs --run_dir, the folder that keeps what is written",
    "--mesh=rows=4": "no axis is called 'rows'; the model splits over replica, data, expert, seq,",
    "--steps=0": "steps must be positive, not 0",
    "--global_batch=6": "global_batch: 6 sequences do not divide over data=4; the next that do",
    "--remat=some": "remat 'some' is no policy; there are none, full, dots",
    "--remat=offload:q": "remat 'offload:q': on cpu devices there is no other memory",
    "--clip_norm=-1": "clip_norm must be positive, not -1.0",
    "--report=/nowhere/r.html": "--report: the directory /nowhere does not exist",
}

PARSER = make_parser("")


@pytest.mark.parametrize("flag", BAD_FLAGS)
def test_bad_flags_are_one_clear_line(flag):
    with pytest.raises(ValueError, match=re.escape(BAD_FLAGS[flag])):
        make_run(PARSER.parse_args(flag.split()), "cpu")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--resume=soon", "argument --resume: 'soon' is no step, and not auto"),
        ("--profile=9", "argument --profile: '9' is not of the form first:last, as in 10:13"),
        ("--metrics=json", "argument --metrics: 'json' is no file of metrics; there are jsonl"),
    ],
)
def test_flags_that_cannot_be_read(flag, message, capsys):
    with pytest.raises(SystemExit):
        PARSER.parse_args([flag])
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.endswith("; scripts/train_llama.py --help lists the flags\n")


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
