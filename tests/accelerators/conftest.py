"""Nothing of this folder is collected on CPUs: there every other test does the same."""

import os

collect_ignore_glob = ["test_*.py"] if os.environ["JAX_PLATFORMS"] == "cpu" else []
