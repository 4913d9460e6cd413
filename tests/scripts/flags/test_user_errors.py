"""One message for what a user can mend, a traceback for everything else."""

from pathlib import Path

import pytest

from spmd.scripts.flags.user_errors import INTERRUPTED_EXIT_CODE, ending_on_interrupt, one_message

MAINS = (
    "spmd.scripts.export_llama", "spmd.scripts.generate_text", "spmd.scripts.convert_checkpoints",
    "tools.resume_test", "spmd.scripts.serve_bundle", "spmd.scripts.tokenize_data",
    "spmd.scripts.train_llama",
)  # fmt: skip


def test_what_can_be_mended_ends_in_one_message_and_nothing_else():
    with pytest.raises(SystemExit) as ended, one_message(FileNotFoundError, ValueError):
        raise ValueError("--mesh: 'data' has no size")
    assert ended.value.code == "error: --mesh: 'data' has no size"
    with pytest.raises(KeyError), one_message(FileNotFoundError, ValueError):
        raise KeyError("a mistake of ours")
    with pytest.raises(SystemExit) as ended, one_message(ValueError):
        raise SystemExit(75)  # a status that the script itself chose
    assert ended.value.code == 75


def test_ctrl_c_ends_in_one_word(capsys):
    with pytest.raises(SystemExit) as ended, ending_on_interrupt(), one_message(ValueError):
        raise KeyboardInterrupt
    assert ended.value.code == INTERRUPTED_EXIT_CODE
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("name", MAINS)
def test_scripts_use_it(name):
    """None of them turns errors into messages by itself."""
    path = Path(__file__).parents[3].joinpath(*name.split("."))
    text = path.with_suffix(".py").read_text(encoding="utf-8")
    assert "with one_message(" in text or ", one_message(" in text
    assert 'sys.exit(f"error' not in text
