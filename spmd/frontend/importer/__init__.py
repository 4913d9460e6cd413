"""Imports StableHLO modules as `Program`s."""
