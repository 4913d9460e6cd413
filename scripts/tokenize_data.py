"""Tokenises files once, into a folder that scripts/train_llama.py --data reads.

Files are text, JSONL or Parquet by their names (.jsonl, .ndjson, .json; .parquet; all others are
text), plain or ending in .gz or .zst. Directories stand for all files below them. A run that was
stopped goes on where it was when it is started again with the same arguments.

Examples:
    scripts/tokenize_data --out tokens/wiki --tokenizer llama/tokenizer.json 'wiki/*.jsonl.zst'
    scripts/tokenize_data --out tokens/web --tokenizer llama --field content web/ --workers 16
    scripts/tokenize_data --out tokens/books --document_separator '<|endoftext|>' books.txt
    scripts/tokenize_data --verify tokens/wiki
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.training.data import token_folder
from models.training.data.documents import FORMATS, Format, Source
from models.training.data.files import find_files
from models.training.data.tokenize import ON_ERROR, PIECE_BYTES, OnError, Options, tokenize
from models.training.data.tokenizer import BYTES
from models.training.errors import DataError
from scripts.user_errors import one_message

_OUT = flags.DEFINE_string("out", None, "The folder to make.")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", BYTES, "A tokenizer.json, a folder with one, or `bytes`."
)
_EOS = flags.DEFINE_string("eos_token", None, "Token that ends a document. Default: found out.")
_BOS = flags.DEFINE_string(
    "bos_token", None, "Token that begins a document, '' for none. Default: found out."
)
_FORMAT = flags.DEFINE_enum("format", "auto", FORMATS, "What the files are. Default: by name.")
_FIELD = flags.DEFINE_string("field", "text", "JSONL field or Parquet column with the text.")
_SEPARATOR = flags.DEFINE_string(
    "document_separator",
    "",
    r"What stands between the documents of a text file, \n is a line end. Default: a file is one.",
)
_ON_ERROR = flags.DEFINE_enum(
    "on_error", "stop", ON_ERROR, "What to do with a document that cannot be read."
)
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Processes. Default: one for each CPU.", lower_bound=1
)
_PIECE_MIB = flags.DEFINE_integer(
    "piece_mib", PIECE_BYTES // 2**20, "MiB of a file that become one shard.", lower_bound=1
)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a folder of other tokens.")
_VERIFY = flags.DEFINE_string("verify", None, "Check this folder, reading all of it, and be done.")


def make_options() -> Options:
    """What the flags ask for."""
    return Options(
        tokenizer=_TOKENIZER.value,
        eos_token=_EOS.value,
        bos_token=_BOS.value,
        source=Source(
            format=cast(Format, _FORMAT.value),
            field=_FIELD.value,
            separator=_SEPARATOR.value.replace(r"\n", "\n").replace(r"\t", "\t"),
        ),
        on_error=cast(OnError, _ON_ERROR.value),
        piece_bytes=_PIECE_MIB.value * 2**20,
    )


def run_tokenize(patterns: Sequence[str], console: Console) -> None:
    """Tokenise, with a bar on a terminal, and say what came of it."""
    if not _OUT.value:
        raise DataError("name the folder to make with --out")
    if not patterns:
        raise DataError(
            "name the files to tokenise, as in scripts/tokenize_data --out tokens a.txt"
        )
    workers = _WORKERS.value or os.cpu_count() or 1
    started = time.perf_counter()
    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None, rate="")
        done = {"tokens": 0, "skipped": 0}

        def report(record: dict[str, Any], total: int) -> None:
            for name in done:
                done[name] += record[name]
            rate = done["tokens"] / (time.perf_counter() - started)
            bar.update(task, total=total, advance=1, rate=f"{rate:,.0f} tokens/s")

        manifest = tokenize(
            find_files(patterns),
            Path(_OUT.value),
            make_options(),
            workers=workers,
            overwrite=_OVERWRITE.value,
            report=report,
        )
    print_manifest(manifest, time.perf_counter() - started, console)


def print_manifest(manifest: dict[str, Any], seconds: float, console: Console) -> None:
    """What a folder holds."""
    totals = manifest["totals"]
    console.print(
        f"{_OUT.value}: {totals['tokens']:,} tokens of {totals['documents']:,} documents from "
        f"{len(manifest['files'])} files in {len(manifest['shards'])} shards, {seconds:.1f} s"
    )
    if not totals["skipped"]:
        return
    console.print(f"{totals['skipped']:,} documents were skipped, among them:")
    examples = [text for shard in manifest["shards"] for text in shard["examples"]]
    for text in examples[:5]:
        console.print(f"  {text}")


def run_verify(folder: Path, console: Console) -> None:
    """Check a folder; an error if something is wrong."""
    token_folder.open_folder(folder)
    found = list(token_folder.damages(folder))
    if found:
        raise DataError("; ".join(found))
    console.print(f"{folder}: every file is as it was written")


def main(argv: Sequence[str]) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with one_message(DataError, OSError):
        if _VERIFY.value:
            run_verify(Path(_VERIFY.value), console)
        else:
            run_tokenize(argv[1:], console)


if __name__ == "__main__":
    app.run(main)
