"""Reads the optimized HLO that XLA returns: collectives, sizes, trip counts, a step's time."""
