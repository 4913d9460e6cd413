"""Tokenises files once, into a folder that scripts/train_llama.py --data reads.

Files are text, JSONL or Parquet by their names (.jsonl, .ndjson, .json; .parquet; all others are
text), plain or ending in .gz or .zst. Directories stand for all files below them. A run that was
stopped goes on where it was when it is started again with the same arguments. Rows of JSONL and
Parquet are texts, or, with TRL's fields, chats (messages), prompts with answers (prompt and
completion) or preferences (prompt, chosen and rejected), whose answers alone are learned.

Examples:
    scripts/tokenize_data --out tokens/wiki --tokenizer llama/tokenizer.json 'wiki/*.jsonl.zst'
    scripts/tokenize_data --out tokens/web --tokenizer llama --field content web/ --workers 16
    scripts/tokenize_data --out tokens/chats --tokenizer Llama-3.2-1B-Instruct chats.jsonl
    scripts/tokenize_data --out tokens/books --document_separator '<|endoftext|>' books.txt
    scripts/tokenize_data --verify tokens/wiki
"""

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spmd.cli.flags import Parser, Switch, positive
from spmd.installed import as_called
from spmd.models.fields import of_fields, taken
from spmd.models.training.data import token_folder
from spmd.models.training.data.chat import find_template
from spmd.models.training.data.documents import DocumentSource, find_files
from spmd.models.training.data.shard_jobs import PIECE_BYTES, TokenizeOptions
from spmd.models.training.data.tokenize import tokenize
from spmd.models.training.errors import DataError
from spmd.models.training.paths import as_path
from spmd.scripts.flags.user_errors import one_message


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("scripts/tokenize_data", __doc__)
    add = parser.add_argument
    of_options, of_source = of_fields(add, TokenizeOptions), of_fields(add, DocumentSource)
    add("files", nargs="*", help="files, directories, glob patterns or URLs of text")
    add("--out", help="the folder to make, or its URL on an object store")
    of_options("--tokenizer", help="a tokenizer.json, a folder with one, or `bytes`")
    of_options("--eos_token", help="token that ends a document (default: found out)")
    of_options("--bos_token", help="token that begins a document, '' for none (default: found out)")
    of_source("--format", help="what the files are; auto: by name")
    of_source("--field", help="JSONL field or Parquet column with the text or messages")
    add("--chat_template", help="file with the template of messages (default: the tokenizer's)")
    add(
        "--document_separator",
        default="",
        help=r"what stands between the documents of a text file, \n is a line end (default: a file "
        "is one)",
    )
    of_options("--on_error", help="for a document that cannot be read")
    add("--workers", type=positive, help="processes (default: one for each CPU)")
    add(
        "--piece_mib",
        type=positive,
        default=PIECE_BYTES // 2**20,
        help="MiB of a file that become one shard",
    )
    add("--overwrite", action=Switch, help="replace a folder of other tokens")
    add("--verify", metavar="FOLDER", help="check this folder, reading all of it")
    return parser


def run_tokenize(given: argparse.Namespace, console: Console) -> None:
    """Tokenise, with a bar on a terminal, and say what came of it."""
    if not given.out:
        raise DataError("name the folder to make with --out")
    if not given.files:
        raise DataError(
            as_called("name the files to tokenise, as in scripts/tokenize_data --out tokens a.txt")
        )
    source = taken(
        DocumentSource,
        given,
        separator=given.document_separator.replace(r"\n", "\n").replace(r"\t", "\t"),
        template=find_template(given.tokenizer, given.chat_template),
    )
    workers = given.workers or os.cpu_count() or 1
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
            find_files(given.files),
            as_path(given.out),
            taken(TokenizeOptions, given, source=source, piece_bytes=given.piece_mib * 2**20),
            workers=workers,
            overwrite=given.overwrite,
            report=report,
        )
    seconds = time.perf_counter() - started
    totals = manifest["totals"]
    console.print(
        f"{given.out}: {totals['tokens']:,} tokens of {totals['documents']:,} documents from "
        f"{len(manifest['files'])} files in {len(manifest['shards'])} shards, {seconds:.1f} s"
    )
    skipped = totals["skipped"]
    if not skipped:
        return
    console.print(f"{skipped:,} documents were skipped, among them:")
    examples = [text for shard in manifest["shards"] for text in shard["examples"]]
    for text in examples[:5]:
        console.print(f"  {text}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with one_message(DataError, OSError):
        if given.verify:
            folder = as_path(given.verify)
            token_folder.open_folder(folder)
            found = list(token_folder.damages(folder))
            if found:
                raise DataError("; ".join(found))
            console.print(f"{folder}: every file is as it was written")
        else:
            run_tokenize(given, console)


if __name__ == "__main__":
    main()
