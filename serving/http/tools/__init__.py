"""Tools: what clients offer, how templates and models write calls, and how these are read."""
