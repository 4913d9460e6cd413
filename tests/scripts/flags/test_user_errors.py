"""One message for what a user can mend, a traceback for everything else."""

import pytest

from spmd.scripts.flags.user_errors import INTERRUPTED_EXIT_CODE, ending_on_interrupt, one_message


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
