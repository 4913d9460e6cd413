"""Meshes, axes, shardings and the machines they lie on."""
