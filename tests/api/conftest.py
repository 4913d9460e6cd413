"""These tests are about what a program computes and how it is called, not about plans."""

from tests.greedy import greedy_plans

__all__ = ["greedy_plans"]
