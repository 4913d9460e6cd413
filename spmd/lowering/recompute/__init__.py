"""Remat: values that would not fit in memory are computed again where they are read."""
