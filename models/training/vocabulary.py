"""Text <-> tokens: any `tokenizer.json`, or plain bytes.

Nothing here needs jax, so that processes which only tokenize start quickly.
"""

from __future__ import annotations

import dataclasses
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
"""Token between documents of bytes: a byte that no text contains."""

KNOWN_DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")
"""What document ends are called, looked for in this order where nothing says which one it is."""

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """Encodes documents; `name` makes an equal one in another process."""

    @property
    def name(self) -> str:
        """`"bytes"`, or the path of the `tokenizer.json`."""

    @property
    def hash(self) -> str:
        """Equal for tokenizers that encode alike."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    @property
    def eos_id(self) -> int:
        """Token after each document."""

    @property
    def bos_id(self) -> int | None:
        """Token before each document, if there is to be one."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokens of each text, without any that mark its start or end."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; what is no text becomes the replacement character."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 (little endian) that holds every token id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def load_tokenizer(
    name: str = BYTES, *, eos: str | None = None, bos: str | None = None
) -> Tokenizer:
    """The tokenizer of that name.

    Args:
        name: `"bytes"`, a `tokenizer.json`, or a folder that holds one.
        eos: the token that ends a document; None takes `eos_token` of a `tokenizer_config.json`
            beside the file, else one of `KNOWN_DOCUMENT_ENDS`.
        bos: a token to put before each document; None puts none.

    Raises:
        DataError: no such file, not a tokenizer, or no such token.
    """
    if name == BYTES:
        if eos is not None or bos is not None:
            raise DataError("the byte tokenizer has no named tokens: leave --eos and --bos out")
        return ByteTokenizer()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise DataError(f"{path} does not exist: name a tokenizer.json, or {BYTES!r}")
    return FileTokenizer(str(path), eos=eos, bos=bos)


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8, one token each, and zero for the end of a document."""

    name: str = BYTES
    hash: str = "bytes-1"
    vocab_size: int = BYTE_VOCABULARY
    eos_id: int = DOCUMENT_END
    bos_id: None = None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The bytes of each text.

        Raises:
            DataError: a text contains a zero byte, which stands for its end.
        """
        encoded = [text.encode("utf-8") for text in texts]
        if any(DOCUMENT_END in text for text in encoded):
            raise DataError("the text contains a zero byte, which stands for a document's end")
        return [np.frombuffer(text, np.uint8) for text in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of bytes; those that are not valid UTF-8 become the replacement character."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A Hugging Face `tokenizer.json`.

    Names of special tokens that occur inside a text are encoded as the text that they are: a web
    page about `</s>` does not end its document.
    """

    name: str
    eos: str | None = None
    bos: str | None = None

    def __post_init__(self) -> None:
        _ = self._tokenizer, self.eos_id, self.bos_id  # what is wrong is said at once

    def __reduce__(self) -> Any:
        return FileTokenizer, (self.name, self.eos, self.bos)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer as HfTokenizer

        try:
            tokenizer = HfTokenizer.from_file(self.name)
        except Exception as error:  # the library raises nothing more precise
            raise DataError(f"{self.name} is no tokenizer.json: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @functools.cached_property
    def hash(self) -> str:
        """Of the file, and of the tokens around documents."""
        digest = hashlib.sha256(Path(self.name).read_bytes())
        digest.update(json.dumps([self.eos_id, self.bos_id]).encode())
        return digest.hexdigest()[:32]

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; added tokens count."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def eos_id(self) -> int:
        """Token after each document."""
        if self.eos is not None:
            return self._id(self.eos, "--eos")
        for name in (_configured_eos(Path(self.name)), *KNOWN_DOCUMENT_ENDS):
            token = None if name is None else self._tokenizer.token_to_id(name)
            if token is not None:
                return int(token)
        raise DataError(f"{self.name} does not say which token ends a document: name it with --eos")

    @functools.cached_property
    def bos_id(self) -> int | None:
        """Token before each document, if there is to be one."""
        return None if self.bos is None else self._id(self.bos, "--bos")

    def _id(self, token: str, flag: str) -> int:
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise DataError(f"{flag}: {self.name} has no token {token!r}")
        return int(number)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Token ids of each text."""
        dtype = token_dtype(self.vocab_size)
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return str(self._tokenizer.decode([int(token) for token in tokens]))


def _configured_eos(path: Path) -> str | None:
    """`eos_token` of the `tokenizer_config.json` beside a `tokenizer.json`."""
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    try:
        eos = json.loads(config.read_text("utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{config} is no JSON object: {error}") from error
    return eos.get("content") if isinstance(eos, dict) else eos
