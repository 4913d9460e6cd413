import functools

import jax
import pytest

from spmd.models.llama import fresh
from spmd.models.llama.named import CONFIGS
from tests.models.llama.weights import checkpoints


@pytest.fixture(scope="session")
def tiny_params():
    """Parameters of the scanned tiny model."""
    init = functools.partial(fresh.init, config=CONFIGS["tiny"])
    return jax.jit(init)(jax.random.key(0))


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
