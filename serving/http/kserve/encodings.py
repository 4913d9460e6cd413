"""Compressed bodies: gzip, and deflate with zlib's header."""

from __future__ import annotations

import zlib

from serving.errors import ApiError, invalid

_GZIP, _EITHER = 16 + zlib.MAX_WBITS, 32 + zlib.MAX_WBITS
_FORMATS = {"gzip": _GZIP, "deflate": zlib.MAX_WBITS}


def check_encoding(encoding: str) -> None:
    """Raises an `ApiError` for a Content-Encoding that is not read here."""
    if encoding and encoding not in _FORMATS:
        raise ApiError(
            415, f"Content-Encoding: gzip or deflate is needed, or none, not {encoding[:40]}"
        )


def unpack(body: bytes, most: int) -> bytes:
    """A body as it was before it was compressed.

    Args:
      most: bytes that it may have then.

    Raises:
      ApiError: it is damaged, or larger.
    """
    stream = zlib.decompressobj(_EITHER)
    try:
        plain = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise invalid(f"the body cannot be unpacked: {error}") from error
    if len(plain) > most:
        raise ApiError(413, f"the body is too large unpacked: {most:,} bytes are the most")
    if not stream.eof or stream.unused_data:
        raise invalid("the body cannot be unpacked: it ends too soon, or too late")
    return plain


def wanted_encoding(accepted: str) -> str:
    """How to compress an answer, by the request's Accept-Encoding; empty: not at all.

    Many programs send a list of all that they know, whatever they ask for. Numbers compress badly
    and slowly, so an answer is compressed for those who name one encoding and mean it.
    """
    name = accepted.strip().lower()
    return name if name in _FORMATS else ""


def pack(body: bytes, encoding: str) -> bytes:
    """A body, compressed."""
    stream = zlib.compressobj(1, wbits=_FORMATS[encoding])
    return stream.compress(body) + stream.flush()
