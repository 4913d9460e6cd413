"""The accelerators at hand, of which a power of two are used."""

import jax
import pytest

DEVICES = jax.devices()
COUNT = 1 << (len(DEVICES).bit_length() - 1)
PLATFORM = DEVICES[0].platform
if PLATFORM == "cpu":
    pytest.skip("no accelerator: is SPMD_TEST_PLATFORM set?", allow_module_level=True)
