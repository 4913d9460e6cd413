"""Propagation: carries the marks of a program to every value, along the rules of its ops."""
