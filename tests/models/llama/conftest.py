import functools

import pytest

from spmd.models.llama.named import CONFIGS
from tests.models.llama.made import fresh_params
from tests.models.llama.weights import checkpoints


@pytest.fixture(scope="session")
def tiny_params():
    return fresh_params(CONFIGS["tiny"])


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Variant -> its checkpoint, which transformers wrote."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")

    @functools.cache
    def folder(variant):
        path = tmp_path_factory.mktemp("checkpoints") / variant
        checkpoints.write(variant, path)
        return path

    return folder
