"""The tokenizer of benchmarks/load_server.py: a word is a token, and every token is text."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.load_server import write_tokenizer
from benchmarks.workloads import WORKLOADS
from models.training.data.tokenizer import load_tokenizer
from serving.engine.text import Detokenizer


@pytest.mark.parametrize("vocab_size", [256, 32_000])
def test_words_are_tokens(vocab_size: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", vocab_size)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (vocab_size, 0, None)
    texts = [ask.prompt for ask in WORKLOADS["prefix"].scaled(0.2).asks()]
    prompts = tokenizer.encode_batch(texts)
    for ids, text in zip(prompts, texts, strict=True):
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text
    drawn = Detokenizer(tokenizer.decode, prompts[0].tolist())
    assert all(drawn.push(token) for token in range(vocab_size))
