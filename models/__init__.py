"""Models as ordinary single-device JAX functions, with their sharding tables beside them."""
