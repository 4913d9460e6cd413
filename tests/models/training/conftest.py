import random

import pytest


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """The path of a byte-level tokenizer.json with 300 ids, trained on some words."""
    from tests.models.training.data.test_beginnings import trained_bytes

    words = ["the", "there", "quick", "brown", "fox", "over", "lazier", "dogs", "jumping", "naïve"]
    text = " ".join(random.Random(0).choices(words, k=3000))
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    trained_bytes(text, 300, ("<s>", "</s>")).save(str(path))
    return path
