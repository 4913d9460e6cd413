"""A text has no fewer tokens than its length says, wherever there is such a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from models.training.data.token_length import longest_token


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox   jumps over é ΐ the lazy dog"] * 9, trainer)
    return made


def fallback() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "▁ab"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁a", "b")]
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def composed() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


BOUNDED = [byte_level(), fallback(), composed()]


def bound(tokenizer: Tokenizer) -> int | None:
    return longest_token(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("tokenizer", BOUNDED)
@given(text=st.text() | st.text("ab the<|end|>\u1fbe\u0308\u0341\u0301e \n"))
def test_a_text_has_at_least_so_many_tokens(tokenizer: Tokenizer, text: str) -> None:
    longest = bound(tokenizer)
    assert longest is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) * longest >= len(text.encode())


def change(**changes: Any) -> Tokenizer:
    made = byte_level()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def greedy() -> Tokenizer:
    made = byte_level()
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
