"""Reads the optimized HLO that XLA returns: collectives, schedule, sizes, trip counts."""
