"""Meshes of devices, shardings of values over them, and figures of chips and their links."""
