"""What `scripts/convert_checkpoints` says."""

import pytest

from scripts import convert_checkpoints


def failure(capsys, *arguments):
    """The one line in which it ends with these arguments."""
    with pytest.raises(SystemExit) as caught:
        convert_checkpoints.main([*map(str, arguments)])
    capsys.readouterr()
    message = str(caught.value.code)
    assert message.startswith("error: ")
    assert "\n" not in message
    return message
