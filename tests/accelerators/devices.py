"""The accelerators at hand, of which a power of two are used."""

import jax

DEVICES = jax.devices()
COUNT = 1 << (len(DEVICES).bit_length() - 1)
PLATFORM = DEVICES[0].platform
