"""What a compiled program really does: steps are run under jax's profiler and read back."""
