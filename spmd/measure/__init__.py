"""Measures compiled programs: runs steps under jax's profiler, and reads and labels its events."""
