"""The training loop, and what it is made of: step, optimizer, metrics, profile, stopping."""
