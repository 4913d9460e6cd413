import random

import pytest


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """The path of a byte-level tokenizer.json with 300 ids, trained on some words."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["the", "there", "quick", "brown", "fox", "over", "lazier", "dogs", "jumping", "naïve"]
    chosen = random.Random(0).choices(words, k=3000)
    tokenizer.train_from_iterator([" ".join(chosen)], trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
