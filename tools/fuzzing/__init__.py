"""Random programs: how they are made, run beside `jax.jit`, and made smaller."""
