"""Programs on the command line: `spmd-explain` and `spmd-verify`, and how flags are read."""
