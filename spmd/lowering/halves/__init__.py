"""Halves: a dim of the arguments is cut in two, and one half's exchanges run beside the other."""
