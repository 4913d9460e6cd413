import io

from rich.console import Console

from models.progress import bytes_bar

LONG = 2**30


def shown(total, **terminal):
    printed = io.StringIO()
    console = Console(file=printed, width=80, **terminal)
    with bytes_bar("loading weights", total, console) as advance:
        advance(total // 2)
    return printed.getvalue()


def test_a_long_transfer_has_a_bar_on_a_terminal():
    text = shown(LONG, force_terminal=True)
    assert "loading weights" in text
    assert "0.5/1.1 GB" in text


def test_there_is_none_elsewhere():
    assert shown(LONG, force_terminal=False) == ""
    assert shown(1000, force_terminal=True) == ""
    with bytes_bar("loading weights", LONG, None) as advance:
        advance(1)
