"""Pieces of files, however they are cut, have the documents of the whole."""

import json

from hypothesis import given
from hypothesis import strategies as st

from models.training.data import documents
from models.training.data.documents import Bad, Source, Text


def texts_of(piece, source):
    """The texts of a piece, all of which can be read."""
    for item in documents.read(piece, source):
        assert isinstance(item, Text)
        yield item.text


SEPARATORS = ["|", "<>", "||", "aa"]


@given(
    st.lists(st.text("ab|<>é\n", max_size=12), max_size=12),
    st.sampled_from(SEPARATORS),
    st.integers(1, 40),
)
def test_pieces_of_text_are_its_documents(tmp_path_factory, texts, separator, piece_bytes):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_text(separator.join(texts))
    source = Source(separator=separator)
    pieces = documents.cut(path, source, piece_bytes)
    found = [text for piece in pieces for text in texts_of(piece, source)]
    assert found == [t for t in path.read_text().split(separator) if t.strip()]


@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 60), st.booleans())
def test_pieces_of_jsonl_are_its_lines(tmp_path_factory, texts, piece_bytes, ends):
    path = tmp_path_factory.getbasetemp() / "pieces.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join(lines) + "\n" * ends)
    pieces = documents.cut(path, Source(), piece_bytes)
    found = [item for piece in pieces for item in documents.read(piece, Source())]
    wanted: list[str | None] = []
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            wanted.append(None)
        else:
            wanted += [text] if text.strip() else []
    assert [None if isinstance(item, Bad) else item.text for item in found] == wanted
