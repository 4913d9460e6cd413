"""Serving: a bundle of exported functions, an engine with slots over it, and an HTTP server."""
