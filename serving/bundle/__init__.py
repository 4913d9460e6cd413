"""Exported models on disk: bundles are written, read, checked and placed on a mesh here."""
