"""Flags for folders that have to be on a disk."""

import argparse
from pathlib import Path

from spmd.models.training.paths import is_url


def on_disk(text: str) -> Path:
    """A local path; a URL of an object store ends the program with what to do instead."""
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is on an object store, and this program works on a disk: copy with the "
            "store's own tools, such as `aws s3 sync` or `gcloud storage rsync`"
        )
    return Path(text)
