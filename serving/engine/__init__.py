"""Continuous batching: the scheduler, its slots, and what it asks of a model. Knows no HTTP."""
