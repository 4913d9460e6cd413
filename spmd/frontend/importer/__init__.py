"""Reads StableHLO modules and converts them to `Program`s, on which all later stages work."""
