"""Checkpoints of a training run: saved while it goes on, checked, read back on any mesh."""
