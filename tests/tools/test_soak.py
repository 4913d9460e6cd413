"""The soak's crowd, for a short while; what it finds is not hidden."""

from collections import Counter

import pytest

from tools import soak


def test_the_text_of_a_stream():
    event = 'data: {"choices": [{"text": "%s"}]}\n\n'
    assert soak.text_of(event % "a" + event % "b" + "data: [DONE]\n\n") == "ab"


@pytest.mark.heavy
def test_a_short_soak(capsys):
    with pytest.raises(SystemExit) as ended:
        soak.main(["--minutes", "0.2", "--clients", "20"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert "lost: 0, wrong: 0" in printed
    lines = Counter(line.split()[-2] for line in printed.splitlines() if "200" in line)
    assert lines["whole:"] and lines["stream:"]
