"""Texts begin as transformers begins them, or as in training; their tokens have a bound."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from spmd.models.training.data.beginnings import as_trained, prompt_ids
from spmd.models.training.data.tokenizer import ByteTokenizer, load_tokenizer, longest_token

TEXTS = ("ab", "a b", "", "<s>ab", " b")
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def byte_level() -> Tokenizer:
    """As GPT-2's: it names a beginning, and puts nothing there."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({x: i for i, x in enumerate([*NAMES.values(), *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens([*NAMES.values()])
    return made


def llama_3() -> Tokenizer:
    """Byte-level, with a template behind it."""
    made = byte_level()
    made.post_processor = processors.Sequence([processors.ByteLevel(), template("<s> $A")])
    return made


def with_fallback(special: list[str], letters: list[str], merges: list[Any]) -> Tokenizer:
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def llama_2() -> Tokenizer:
    """Blanks are letters, one is put before a text, and bytes that have no letter are tokens."""
    made = with_fallback([*NAMES.values()], ["▁", "a", "b"], [])
    made.add_special_tokens([*NAMES.values()])
    made.post_processor = template("<s> $A")
    return made


def both_ends() -> Tokenizer:
    """What ends a text is no beginning."""
    made = byte_level()
    made.post_processor = template("<s> $A </s>")
    return made


def template(single: str) -> Any:
    return processors.TemplateProcessing(
        single=single, special_tokens=[(token, i) for i, token in enumerate(NAMES.values())]
    )


def trained_bytes(
    text: str = "the quick brown fox   jumps over é ΐ the lazy dog " * 9,
    size: int = 400,
    special: Sequence[str] = ("<|end|>",),
) -> Tokenizer:
    """Byte-level, with tokens of what stands in a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[*special], show_progress=False
    )
    made.train_from_iterator([text], trainer)
    return made


def saved(tokenizer: Tokenizer, folder: Path, **more: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


CASES = [
    (byte_level, ()), (llama_3, (0,)), (llama_2, (0,)), (both_ends, (0,)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "begins"), CASES)
def test_what_stands_before_a_text(make: Any, begins: tuple[int, ...], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(saved(make(), tmp_path)))
    assert (tokenizer.bos_id, tokenizer.begins) == (0, begins)
    ids, added = prompt_ids(tokenizer, "ab")
    assert ids == [*begins, *tokenizer.encode_batch(["ab"])[0]] and added == len(begins)
    assert prompt_ids(tokenizer, "ab", special=False) == (ids[added:], 0)


@pytest.mark.parametrize("more", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("make", [byte_level, llama_3, llama_2])
def test_prompts_are_those_of_transformers(make: Any, more: Any, tmp_path: Path) -> None:
    """`add_bos_token` changes nothing where there is a `tokenizer.json`."""
    transformers = pytest.importorskip("transformers")
    folder = saved(make(), tmp_path, **more)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(str(folder))
    for text in filter(None, TEXTS):
        assert prompt_ids(ours, text)[0] == theirs(text).input_ids


def test_an_empty_text_is_the_beginning_of_a_document(tmp_path: Path) -> None:
    assert prompt_ids(load_tokenizer(str(saved(byte_level(), tmp_path))), "") == ([0], 1)
    assert prompt_ids(ByteTokenizer(), "") == ([0], 1)
    unnamed = load_tokenizer(str(tmp_path), bos_token="")
    assert prompt_ids(unnamed, "") == ([unnamed.eos_id], 1)


@pytest.mark.parametrize("bos_token", [None, ""])
@pytest.mark.parametrize(("make", "begins"), CASES)
def test_exports_begin_texts_as_training_did(
    make: Any, begins: tuple[int, ...], bos_token: str | None, tmp_path: Path
) -> None:
    trained = load_tokenizer(str(saved(make(), tmp_path)), bos_token=bos_token)
    wanted = [] if trained.bos_id is None else [trained.bos_id]
    with as_trained(tmp_path, trained) as folder:
        assert (folder == tmp_path) == (list(begins) == wanted)
        shipped = load_tokenizer(str(folder))
        assert list(shipped.begins) == wanted
        for text in TEXTS:
            assert [*shipped.encode_batch([text])[0]] == [*trained.encode_batch([text])[0]]
        assert sorted(path.name for path in folder.iterdir()) == [
            "tokenizer.json", "tokenizer_config.json",
        ]  # fmt: skip
        transformers = pytest.importorskip("transformers")
        ids, _ = prompt_ids(shipped, "ab")
        assert transformers.AutoTokenizer.from_pretrained(folder)("ab").input_ids[: len(ids)] == ids


def test_what_is_no_tokenizer_of_that_training_is_shipped_as_it_is(tmp_path: Path) -> None:
    with as_trained(saved(llama_3(), tmp_path), ByteTokenizer()) as folder:
        assert folder == tmp_path
    (tmp_path / "tokenizer.json").write_text("{}")
    with as_trained(tmp_path, ByteTokenizer()) as folder:
        assert folder == tmp_path


def change(**changes: Any) -> Tokenizer:
    made = trained_bytes()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


MERGED = with_fallback(["<unk>"], ["▁", "a", "▁a", "b", "▁ab"], [("▁", "a"), ("▁a", "b")])
BOUNDED = [trained_bytes(), MERGED, change(normalizer=normalizers.NFC())]


def bound(tokenizer: Tokenizer) -> int | None:
    return longest_token(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("tokenizer", BOUNDED)
@given(text=st.text() | st.text("ab the<|end|>\u1fbe\u0308\u0341\u0301e \n"))
def test_a_text_has_at_least_so_many_tokens(tokenizer: Tokenizer, text: str) -> None:
    longest = bound(tokenizer)
    assert longest is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) * longest >= len(text.encode())


def greedy() -> Tokenizer:
    made = trained_bytes()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return made


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        Tokenizer(models.BPE({"a": 0}, [])),  # letters that it does not know are dropped
        change(pre_tokenizer=pre_tokenizers.Whitespace()),
        change(normalizer=normalizers.Strip()),
        change(normalizer=normalizers.Replace("a", "")),
        change(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])),
        greedy(),
    ],
)
def test_there_is_no_bound_where_text_may_vanish(tokenizer: Tokenizer) -> None:
    assert bound(tokenizer) is None
