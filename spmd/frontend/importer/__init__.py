"""A StableHLO module to a `Program`."""
