"""Runs the partitioned and the unpartitioned program and finds the first op that differs."""
