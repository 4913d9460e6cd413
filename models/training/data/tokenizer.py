"""Text <-> token ids: plain bytes, or any `tokenizer.json` of Hugging Face's tokenizers."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from models.training.errors import DataError

BYTES = "bytes"
"""Name of the built-in tokenizer."""

BYTE_VOCABULARY = 256
DOCUMENT_END = 0
"""The byte tokenizer's end of a document: a byte that no text contains."""

EOS_TOKENS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>")
BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>")
"""What ends and begins documents where neither the user nor `tokenizer_config.json` says so."""


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer.

    Attributes:
        name: `bytes`, or the path of the file.
        sha256: hash of all that decides its ids.
        vocab_size: ids are below it.
        eos_id, bos_id: the ids that end and begin a document; not every tokenizer has a `bos_id`.
    """

    name: str
    sha256: str
    vocab_size: int
    eos_id: int
    bos_id: int | None

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The ids of each text, without any that begin or end it."""

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text."""


class ByteTokenizer:
    """The bytes of UTF-8, and 0 as the end of a document."""

    name = BYTES
    sha256 = hashlib.sha256(b"bytes, documents end with 0").hexdigest()
    vocab_size = BYTE_VOCABULARY
    eos_id = DOCUMENT_END
    bos_id: int | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The bytes of each text."""
        return [encode(text).astype(np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes -> text; what is not valid UTF-8 becomes the replacement character."""
        return decode(ids)


class FileTokenizer:
    """A `tokenizer.json`.

    Special tokens that a text spells out become those tokens, as everywhere else with such files.
    """

    def __init__(self, path: Path, eos_id: int, bos_id: int | None = None) -> None:
        import tokenizers

        try:
            content = path.read_bytes()
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror}") from error
        except Exception as error:  # the library raises bare exceptions
            raise DataError(f"tokenizer {path} is no tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = str(path)
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.eos_id, self.bos_id = eos_id, bos_id
        self.sha256 = hashlib.sha256(content + f" {eos_id} {bos_id}".encode()).hexdigest()

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The ids of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def _find_special(path: Path, kind: str, given: str | None, usual: Sequence[str]) -> int | None:
    """The id of a special token: the one given, else the configured, else a usual one."""
    vocabulary = FileTokenizer(path, eos_id=0)
    if given == "":
        return None
    if given is not None:
        token_id = vocabulary.token_to_id(given)
        if token_id is None:
            raise DataError(f"--{kind}: tokenizer {path} has no token {given!r}")
        return token_id
    names = (*_configured(path.with_name("tokenizer_config.json"), kind), *usual)
    ids = (vocabulary.token_to_id(name) for name in names)
    return next((token_id for token_id in ids if token_id is not None), None)


def _configured(path: Path, kind: str) -> list[str]:
    """The special token that a `tokenizer_config.json` names, if there is one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get(kind)
    except (OSError, ValueError, AttributeError):
        return []
    content = value.get("content") if isinstance(value, dict) else value
    return [content] if isinstance(content, str) else []


@functools.lru_cache(maxsize=4)
def load_tokenizer(
    name: str = BYTES, eos_token: str | None = None, bos_token: str | None = None
) -> Tokenizer:
    """A tokenizer by name.

    Args:
        name: `bytes`, a `tokenizer.json`, or a folder with one.
        eos_token, bos_token: what ends and begins a document; None finds out, "" is no beginning.

    Raises:
        DataError: there is no such file, or it has no token that could end a document.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    eos_id = _find_special(path, "eos_token", eos_token or None, EOS_TOKENS)
    if eos_id is None:
        raise DataError(
            f"tokenizer {path} has none of the usual ends of a document ({', '.join(EOS_TOKENS)}); "
            "name the token with --eos_token"
        )
    return FileTokenizer(path, eos_id, _find_special(path, "bos_token", bos_token, BOS_TOKENS))


def encode(text: str) -> npt.NDArray[np.uint8]:
    """Text -> its UTF-8 bytes, one token each."""
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def decode(tokens: Iterable[int]) -> str:
    """Bytes -> text; bytes that are not valid UTF-8 become the replacement character."""
    return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")
