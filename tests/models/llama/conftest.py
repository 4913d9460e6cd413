import functools

import jax
import pytest

from models.llama import model
from models.llama.config import CONFIGS


@pytest.fixture(scope="session")
def tiny_params():
    """Parameters of the scanned tiny model."""
    init = functools.partial(model.init, config=CONFIGS["tiny"])
    return jax.jit(init)(jax.random.key(0))
