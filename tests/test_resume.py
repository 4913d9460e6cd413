"""Training that is killed and resumed, and what the script says to bad flags."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.resume_test import Failed, compare, resume_test, steps_for

ROOT = Path(__file__).parents[1]

BAD_FLAGS = {
    "--resume=auto": "--resume needs --run_dir, the folder that keeps what is written",
    "--run_dir=r --resume=soon": "--resume: 'soon' is no step, and not auto",
    "--run_dir=r --profile=9": "'9' is not of the form first:last, as in 10:13",
    "--mesh=data": "--mesh: 'data' is not of the form axis=size, as in data=4,model=2",
    "--mesh=rows=4": "--mesh: no axis is called 'rows'; the model splits over replica, data, model",
    "--mesh=data=2,data=2": "--mesh: axis 'data' is given twice",
    "--steps=0": "total_steps must be positive, not 0",
    "--global_batch=6": "global_batch: 6 sequences do not divide over data=4; the next that do",
    "--remat=some": "remat 'some' is no policy; there are none, full, dots",
    "--remat=offload:q": "remat 'offload:q': on cpu devices there is no other memory",
    "--clip_norm=-1": "clip_norm must be positive, not -1.0",
    "--report=/nowhere/r.html": "--report: the directory /nowhere does not exist",
}

GOOD_FLAGS = ("--run_dir=r --resume --steps=7", "--seq_len=4097", "--seq_len=4096")

PARSE = """
import sys
from absl import flags
from scripts import train_flags, train_llama
train_flags.FLAGS([""])
for line in sys.stdin.read().splitlines():
    train_flags.FLAGS.unparse_flags()
    for flag in train_flags.GROUPS.values():
        for name in flag:
            train_flags.FLAGS[name].unparse()
    train_flags.FLAGS(train_flags.with_resume_value(["", *line.split()]))
    try:
        run = train_flags.make_run("cpu")
        print(*train_llama.notices(run), run)
    except ValueError as error:
        print(error)
print(train_flags.help_text("about"))
"""


@pytest.mark.parametrize("kills", [10, pytest.param(30, marks=pytest.mark.heavy)])
def test_killed_and_resumed_it_is_the_same_run(kills, tmp_path):
    """As `tools/run resume_test`: real signals at random moments, the last one a SIGTERM."""
    resume_test(tmp_path, kills=kills, steps=steps_for(kills), devices=1, seed=1)
    assert not list((tmp_path / "killed").rglob("*orbax-checkpoint-tmp*"))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 5', '"loss": 6', 1))
    with pytest.raises(Failed, match="the losses differ"):
        compare(tmp_path / "alone", tmp_path / "killed", steps_for(kills))


@pytest.fixture(scope="module")
def parsed():
    """What comes of each of `BAD_FLAGS`, of a bare --resume, and the help."""
    result = subprocess.run(
        [sys.executable, "-c", PARSE],
        input="\n".join((*BAD_FLAGS, *GOOD_FLAGS)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_bad_flags_are_one_clear_line(parsed):
    for (flag, message), line in zip(BAD_FLAGS.items(), parsed, strict=False):
        assert line.startswith(message), flag


def test_a_bare_resume_is_automatic(parsed):
    assert "total_steps=7" in parsed[len(BAD_FLAGS)]


def test_long_sequences_are_noticed(parsed):
    longer, same = parsed[len(BAD_FLAGS) + 1 : len(BAD_FLAGS) + len(GOOD_FLAGS)]
    says = "note: sequences of 4097 tokens are longer than the 4096 that the model is meant for"
    assert longer.startswith(says)
    assert same.startswith("RunConfig(")


def test_help_shows_every_flag_in_its_group(parsed):
    text = "\n".join(parsed[len(BAD_FLAGS) + len(GOOD_FLAGS) :])
    assert "checkpoints:\n  --run_dir" in text
    assert "  --[no]scan" in text
    files = ("scripts/train_flags.py", "scripts/weight_flags.py")
    defined = sum((ROOT / file).read_text().count("flags.DEFINE_") for file in files)
    assert text.count("\n  --") == defined
