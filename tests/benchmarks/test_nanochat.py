"""benchmarks/nanochat.py: a tiny step of ours, in processes as on a GPU; and what it refuses."""

import pytest

from benchmarks import nanochat

TINY = ("--only=jax,spmd", "--windows=SSL", "--layers=1", "--batch=2", "--tokens=256", "--ids=64")


def test_both_programs_lose_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert nanochat.main([*TINY, "--steps=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_jax, of_ours = (line.strip("| ").split(" | ") for line in lines[4:6])
    assert [of_jax[0], of_ours[0]] == ["jax.jit", "spmd.jit"]
    assert of_jax[-1] == of_ours[-1] and 2 < float(of_jax[-1]) < 4.2


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--only=peer", "--peer takes a checkout of github.com/karpathy/nanochat: it is missing"),
        ("--only=torch", "there is no torch, only peer, jax, spmd"),
        ("--windows=SX", "--windows SX"),
    ],
)
def test_wrong_flags(flag: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nanochat.main([flag])
    assert message in capsys.readouterr().err
