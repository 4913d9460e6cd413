"""Documents of text files: all of a file, or what is between separators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from models.training.data.documents.piece import Bad, DocumentSource, DocumentText, FilePiece
from models.training.data.documents.reading import (
    BLOCK_BYTES,
    BOM,
    checked,
    decode,
    lines_before,
    opened,
)


def cuts_anywhere(separator: str) -> bool:
    """Whether a reader finds the same separators wherever it begins to read.

    Not so with "||": read from the beginning, "a|||b" is "a" and "|b", but read from its third
    character on, the separator ends right before "b". So no end of a separator may be its
    beginning.
    """
    return bool(separator) and not any(
        separator.startswith(separator[-length:]) for length in range(1, len(separator))
    )


def read_text(piece: FilePiece, source: DocumentSource) -> Iterator[DocumentText | Bad]:
    """The documents that begin in a piece, long ones in parts."""
    separator = source.separator.encode()
    is_begun = is_bad = False  # this document: parts of it were given; it cannot be read
    with opened(piece.path) as file:
        for place, part, is_last in _split(file, separator, piece.start, piece.stop):
            if not is_bad:
                try:
                    text = checked(decode(part.removeprefix(b"" if place else BOM)), source)
                except ValueError as error:
                    is_bad = True
                    line = lines_before(piece.path, place) + 1
                    yield Bad(f"{piece.path}, in the text from line {line} on: {error}")
                else:
                    if is_begun or text.strip():
                        yield DocumentText(text, is_last)
                        is_begun = True
            if is_last:
                is_begun = is_bad = False


def _split(
    file: BinaryIO, separator: bytes, start: int, stop: int | None
) -> Iterator[tuple[int, bytes, bool]]:
    """The documents that begin in a range, in parts of bounded size.

    Yields:
        (place in the file, bytes, whether the document ends with them).
    """
    # A separator that ends exactly at `start` has to be seen, or the document behind it is lost.
    place = max(0, start - len(separator))
    if place:
        file.seek(place)
    is_found = start == 0  # whether `place` is where a document of ours begins or goes on
    buffer, is_end = b"", False
    while not is_end:
        block = file.read(BLOCK_BYTES)
        is_end = not block
        buffer += block
        low = 0
        while separator and (high := buffer.find(separator, low)) >= 0:
            if is_found:
                yield place + low, buffer[low:high], True
            low = high + len(separator)
            is_found = True
            if stop is not None and place + low >= stop:
                return
        if is_end and is_found:
            yield place + low, buffer[low:], True
        elif len(buffer) - low >= BLOCK_BYTES:
            # The end of the buffer may be the beginning of a separator: it stays for later.
            upto = _good_cut(buffer, low, len(buffer) - max(1, len(separator)))
            if is_found:
                yield place + low, buffer[low:upto], False
            low = upto
        place, buffer = place + low, buffer[low:]


def _good_cut(buffer: bytes, low: int, high: int) -> int:
    """Where to cut a long document: after a line, or else between two characters."""
    line_end = buffer.rfind(b"\n", low, high)
    if line_end > low:
        return line_end + 1
    while high > low + 1 and buffer[high] & 0xC0 == 0x80:  # inside a character of UTF-8
        high -= 1
    return high
