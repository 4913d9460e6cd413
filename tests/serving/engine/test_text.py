"""Text of tokens that come one by one: whole characters, stop strings, pieces."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spmd.models.training.data.tokenizer import ByteTokenizer, load_tokenizer
from spmd.serving.engine.text import Detokenizer, StopMatcher, TokenTexts
from tests.models.training.data.test_beginnings import saved, trained_bytes

DECODE = ByteTokenizer().decode


def words(ids: Any) -> str:
    """Like sentencepiece: the space before the first word is left out."""
    return " ".join(f"w{i}" for i in ids)


def byte_fallback(ids: Any) -> str:
    """Like the ByteFallback of tokenizers: one mark for each byte of what is no text."""
    data = bytes(ids)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(data)


def push_all(detokenizer: Detokenizer, ids: Any) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(st.text("aé€😀\u200d中\ufffd", max_size=30))
def test_characters_come_whole_and_as_soon_as_they_are(text: str) -> None:
    pieces = push_all(Detokenizer(DECODE), text.encode())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        ends = [i for i, piece in enumerate(pieces) if piece]
        assert [pieces[i] for i in ends] == list(text)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_become_marks_and_wait_for_four_tokens_at_most(data: bytes) -> None:
    detokenizer = Detokenizer(DECODE)
    text = ""
    for i, token in enumerate(data):
        text += detokenizer.push(token)
        certain = DECODE(data[: max(0, i - 2)])
        assert text.startswith(certain.rstrip("\ufffd"))
    assert text + detokenizer.flush() == DECODE(data)
    several = Detokenizer(DECODE)
    assert several.push(*data[:9]) + several.push(*data[9:]) + several.flush() == DECODE(data)


def test_memory_of_endless_nonsense_is_flat() -> None:
    detokenizer = Detokenizer(DECODE)
    pieces = [detokenizer.push(0xFF) for _ in range(1000)]
    assert "".join(pieces) == "\ufffd" * 997
    assert len(detokenizer._ids) <= 8


@given(st.text("aé中😀", max_size=9), st.text("aé中😀", max_size=5))
def test_prompts_are_not_cut_within_a_character(prompt: str, text: str) -> None:
    assert "".join(push_all(Detokenizer(byte_fallback, prompt.encode()), text.encode())) == text


def test_a_prompt_that_is_no_text() -> None:
    prompt = "中".encode()[:2] * 9  # half characters all the way
    assert "".join(push_all(Detokenizer(DECODE, prompt), b"abc")) == "abc"


def test_the_space_before_a_word_depends_on_the_prompt() -> None:
    assert "".join(push_all(Detokenizer(words, [1, 2]), [3, 4])) == " w3 w4"
    assert "".join(push_all(Detokenizer(words), [3, 4])) == "w3 w4"


def test_a_tokenizer_file(tmp_path: Any) -> None:
    """A byte-level BPE whose tokens cut characters in two."""
    tokenizer = load_tokenizer(str(saved(trained_bytes(special=["</s>"]), tmp_path)))
    text = "the quick 😀 brown — fox é"
    (ids,) = tokenizer.encode_batch([text])
    pieces = push_all(Detokenizer(tokenizer.decode, ids.tolist()[:3]), ids.tolist())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert TokenTexts(tokenizer.decode, ids.tolist()[:1])[int(ids[1])] == pieces[1]


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> str | None:
    """The text before the stop that is complete first; of two the longer one."""
    for end in range(len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return text[: end - max(map(len, here))]
    return None


@given(st.lists(st.text("abc", max_size=4), max_size=12), STOPS)
def test_stops_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    matcher, text = StopMatcher(stops), ""
    expected = first_stop("".join(pieces), stops)
    for i, piece in enumerate(pieces):
        shown, stopped = matcher.push(piece)
        text += shown
        so_far = "".join(pieces[: i + 1])
        assert so_far.startswith(text)
        if stopped:
            assert text == expected
            return
        # All is shown but what a stop string could begin with.
        held = so_far[len(text) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert expected is None
    assert text + matcher.flush() == "".join(pieces)


def test_pieces_read_as_in_the_middle_of_a_text() -> None:
    assert TokenTexts(words, [0])[5] == " w5"
    assert TokenTexts(DECODE, b"a")[ord("x")] == "x"
