"""Remat: where memory is short, values are recomputed where they are read instead of kept."""
