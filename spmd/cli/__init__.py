"""The programs `spmd explain` and `spmd verify`, and the parser of flags of all programs."""
