"""Training that is killed and resumed; the soak's crowd, for a short while."""

from collections import Counter

import pytest

from tools import soak
from tools.resume_test import Failed, compare, resume_test, steps_for


@pytest.mark.heavy
def test_a_short_soak(capsys):
    with pytest.raises(SystemExit) as ended:
        soak.main(["--minutes", "0.2", "--clients", "20"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert "lost: 0, wrong: 0" in printed
    answered = (x for x in printed.splitlines() if x.endswith((" 200", " done")))
    lines = Counter(line.split()[-2] for line in answered)
    assert lines["whole:"] and lines["stream:"]


@pytest.mark.heavy
def test_full_disks_harm_no_run(tmp_path, capsys):
    kills = 6
    steps = steps_for(kills, faults=True)
    resume_test(tmp_path, kills=kills, steps=steps, devices=1, seed=3, faults=True)
    said = capsys.readouterr().out
    assert "with a full disk: the same run, bit for bit" in said
    assert "no disk is filled" in said or "its disk was full" in said


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.heavy)])
def test_killed_and_resumed_it_is_the_same_run(kills, tmp_path):
    """As `tools/run resume_test`: real signals at random moments, the last one a SIGTERM."""
    resume_test(tmp_path, kills=kills, steps=steps_for(kills), devices=1, seed=1)
    assert not list((tmp_path / "killed").rglob("*orbax-checkpoint-tmp*"))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 5', '"loss": 6', 1))
    with pytest.raises(Failed, match="the losses differ"):
        compare(tmp_path / "alone", tmp_path / "killed", steps_for(kills))
