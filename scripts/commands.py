"""The programs beside this file as commands: `scripts/serve` is `spmd-serve` of a wheel."""

import importlib
import sys
from functools import partial


def run(module: str, extra: str) -> None:
    """Runs a program; without the extra that it needs it ends in a line that says so."""
    try:
        program = importlib.import_module(f"spmd.scripts.{module}")
    except ModuleNotFoundError as error:
        sys.exit(f'error: {error}; pip install "spmd[{extra}]" installs what this needs')
    program.main()


convert_checkpoints = partial(run, "convert_checkpoints", "train")
export_llama = partial(run, "export_llama", "train")
generate = partial(run, "generate_text", "serve")
launch = partial(run, "launch_job", "train")
serve = partial(run, "serve_bundle", "serve")
serve_models = partial(run, "serve_models", "serve")
tokenize_data = partial(run, "tokenize_data", "train")
train_llama = partial(run, "train_llama", "train")
