"""Text <-> token ids: by plain bytes, or by any `tokenizer.json` of Hugging Face's tokenizers."""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spmd.models.training.errors import DataError
from spmd.models.training.paths import AnyPath, as_path, json_object

Int64s = npt.NDArray[np.int64]
# How much text one token stands for at most, so that a text's length bounds its number of tokens.
#
# There is such a bound where every byte is in some token, as with byte-level BPE, and with BPE that
# falls back to bytes. There is none where unknown characters become one token or none, where blanks
# are dropped, or where a token takes the blanks beside it.

NFC = 4
"""By what factor it makes a text shorter at most, rounded up: U+1FBE, U+0308 and U+0341, which are
seven bytes, become U+0390, which is two."""

SPLITS = ("ByteLevel", "Split", "Digits", "Metaspace")


def longest_token(spec: Any) -> int | None:
    """How many bytes of UTF-8 one token stands for at most.

    Args:
        spec: the content of a `tokenizer.json`, as the library writes it.

    Returns:
        None if no bound is known.
    """
    model, added = spec["model"], spec.get("added_tokens") or []
    splits = _parts(spec.get("pre_tokenizer"), "pretokenizers")
    factor = 1
    for step in _parts(spec.get("normalizer"), "normalizers"):
        if step["type"] == "NFC":
            factor = NFC
        elif step["type"] != "Prepend":
            # What is put into the place of something has to be at least as long.
            pattern = step.get("pattern", {}).get("String")
            if step["type"] != "Replace" or pattern is None:
                return None
            if len(step["content"].encode()) < len(pattern.encode()):
                return None
    is_bounded = (
        model.get("type") == "BPE"
        and _knows_all_bytes(model, splits)
        and all(step["type"] in SPLITS and step.get("behavior") != "Removed" for step in splits)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not is_bounded:
        return None
    # The vocabulary has some bytes in other letters, such as U+2581 for a blank; none is shorter.
    texts = [*model["vocab"], *(token["content"] for token in added)]
    return factor * max(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _knows_all_bytes(model: Any, splits: list[Any]) -> bool:
    vocabulary = model["vocab"]
    if any(step["type"] == "ByteLevel" for step in splits):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    fallback = (f"<0x{byte:02X}>" for byte in range(256))
    return bool(model.get("byte_fallback")) and all(token in vocabulary for token in fallback)


def _parts(stage: Any, name: str) -> list[Any]:
    """The parts of a stage: of all sequences in it, or itself."""
    if stage is None:
        return []
    if stage["type"] != "Sequence":
        return [stage]
    return [part for one in stage[name] for part in _parts(one, name)]


SETTINGS = "tokenizer_config.json"

BYTES = "bytes"
"""The name of the built-in tokenizer."""

BYTE_VOCABULARY = 256
DOCUMENT_END = 0
"""The byte tokenizer ends a document with the byte 0, which text does not contain."""

EOS_TOKENS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>")
BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>")
"""The usual tokens that end and begin documents. The first one that the tokenizer has is taken if
neither the user nor `tokenizer_config.json` names one."""


class Tokenizer(Protocol):
    """What this project needs of a tokenizer."""

    name: str  # `bytes`, or the path of the file
    sha256: str  # a hash of everything that decides the ids
    vocab_size: int  # number of ids; all are below it
    eos_id: int  # the id that ends a document
    bos_id: int | None  # the id that begins a document; None if the tokenizer has none
    # the ids that the tokenizer itself puts before a text, as transformers does: what models expect
    # before a prompt. GPT-2's names a `bos_id` and puts nothing there.
    begins: tuple[int, ...]
    longest: int | None  # how many bytes of UTF-8 one token stands for at most; None: no bound

    @property
    def spec(self) -> str | None:
        """The content of its `tokenizer.json`; None if ids are bytes."""

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The ids of each text, without those that begin or end documents."""

    def encode_with_places(self, text: str) -> tuple[npt.NDArray[np.uint32], Int64s]:
        """The same ids (N,) of a text, and where the characters of each begin and end (N, 2)."""

    def decode(self, ids: Iterable[int]) -> str:
        """Token ids -> text."""


class ByteTokenizer:
    """The bytes of UTF-8 as ids, and 0 as the end of a document."""

    name = BYTES
    sha256 = hashlib.sha256(b"bytes, documents end with 0").hexdigest()
    vocab_size = BYTE_VOCABULARY
    eos_id = DOCUMENT_END
    bos_id: int | None = None
    begins: tuple[int, ...] = ()
    longest: int | None = 1
    spec: str | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The bytes of each text."""
        return [encode(text).astype(np.uint32) for text in texts]

    def encode_with_places(self, text: str) -> tuple[npt.NDArray[np.uint32], Int64s]:
        """The bytes of a text, and of which character each is."""
        ids = encode(text).astype(np.uint32)
        character = np.cumsum(ids & 0xC0 != 0x80) - 1  # other bytes go on with a character
        return ids, np.stack([character, character + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes -> text; invalid UTF-8 becomes U+FFFD."""
        return decode(ids)


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`.

    A special token that a text spells out, such as "</s>", becomes that token, as in other
    programs that read such files.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, path: AnyPath, eos_id: int, bos_id: int | None = None) -> None:
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
        # Ids may have gaps, so counting the tokens would give too few.
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos_id, self.bos_id = eos_id, bos_id
        self.begins = _begins(self._tokenizer, vocabulary)
        self.longest = longest_token(json.loads(self._tokenizer.to_str()))
        self.sha256 = hashlib.sha256(content + f" {eos_id} {bos_id}".encode()).hexdigest()

    @property
    def spec(self) -> str:
        """The content of the file, as the library writes it."""
        return str(self._tokenizer.to_str())

    def beginning_with(self, ids: Sequence[int]) -> str:
        """The content of a file that is the same, but puts these ids before a text."""
        import tokenizers

        changed = tokenizers.Tokenizer.from_str(self.spec)
        tokens = [changed.id_to_token(i) for i in ids]
        changed.post_processor = tokenizers.processors.TemplateProcessing(
            single=["begin", "$A"] if ids else ["$A"],
            special_tokens=[{"id": "begin", "ids": list(ids), "tokens": tokens}] if ids else [],
        )
        return str(changed.to_str(pretty=True))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The ids of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def encode_with_places(self, text: str) -> tuple[npt.NDArray[np.uint32], Int64s]:
        """The ids of a text, and the characters of each."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        places = np.asarray(found.offsets, np.int64).reshape(-1, 2)
        return np.asarray(found.ids, np.uint32), places

    def decode(self, ids: Iterable[int]) -> str:
        """Token ids -> text, special tokens included."""
        return str(self._tokenizer.decode([*map(int, ids)], skip_special_tokens=False))


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers make the same ids of texts, whatever files they are from."""
    return _content(one) == _content(other)


def identity(tokenizer: Tokenizer) -> str:
    """A hash of what decides the ids of training; how a file is formatted does not count."""
    parts = (_content(tokenizer), tokenizer.eos_id, tokenizer.bos_id)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _content(tokenizer: Tokenizer) -> str:
    """What decides the ids of a text; not what is put before or behind it."""
    if tokenizer.spec is None:
        return tokenizer.name
    return json.dumps({**json.loads(tokenizer.spec), "post_processor": None}, sort_keys=True)


def _begins(tokenizer: Any, vocabulary: Iterable[str]) -> tuple[int, ...]:
    """What the post-processor of a `tokenizers.Tokenizer` puts before a text.

    `add_bos_token` of `tokenizer_config.json` says nothing: transformers does not read it where
    there is a `tokenizer.json`.
    """
    for text in itertools.chain("a", vocabulary):
        if tokenizer.encode(text, add_special_tokens=False).ids:
            whole = tokenizer.encode(text)
            added = itertools.takewhile(
                lambda pair: pair[1], zip(whole.ids, whole.special_tokens_mask, strict=True)
            )
            return tuple(token for token, _ in added)
    return ()


def _find_special(path: AnyPath, kind: str, given: str | None, usual: Sequence[str]) -> int | None:
    """The id of a special token: of the given one, else the configured one, else a usual one."""
    vocabulary = FileTokenizer(path, eos_id=0)
    if given == "":
        return None
    if given is not None:
        token_id = vocabulary.token_to_id(given)
        if token_id is None:
            raise DataError(f"--{kind}: tokenizer {path} has no token {given!r}")
        return token_id
    value = json_object(path.parent / SETTINGS).get(kind)
    named = value.get("content") if isinstance(value, dict) else value
    names = (*([named] if isinstance(named, str) else []), *usual)
    ids = (vocabulary.token_to_id(name) for name in names)
    return next((token_id for token_id in ids if token_id is not None), None)


@functools.lru_cache(maxsize=4)
def load_tokenizer(
    name: str = BYTES, eos_token: str | None = None, bos_token: str | None = None
) -> Tokenizer:
    """Loads a tokenizer by name.

    Args:
        name: `bytes`, a `tokenizer.json`, or a folder with one.
        eos_token: the token that ends documents; None finds out.
        bos_token: the token that begins documents; None finds out, "" uses none.

    Raises:
        DataError: there is no such file, or it has no token that could end a document.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = as_path(name)
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
    """Bytes -> text; invalid UTF-8 becomes U+FFFD."""
    return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")
