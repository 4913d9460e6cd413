"""Makes shards of tokens, each of one piece of a file, with several processes.

A shard whose record is in the folder is done, and is not made again.
"""

import concurrent.futures
import concurrent.futures.process
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spmd.models.training.data import documents, shard_writer
from spmd.models.training.data.corpus import Bools
from spmd.models.training.data.documents import Bad, DocumentSource, DocumentText, FilePiece
from spmd.models.training.data.shard_writer import Record
from spmd.models.training.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from spmd.models.training.errors import DataError
from spmd.models.training.paths import AnyPath, sha256_of

OnError = Literal["stop", "skip"]

PIECE_BYTES = 64 * 2**20
ENCODED_AT_ONCE = 2**20
"""Number of characters that go to the tokenizer in one call."""

RECORD = ".shard.json"
"""The ending of a shard's record, which is deleted once the manifest has its content."""

EXAMPLES = 5
"""How many messages about skipped documents a shard's record keeps."""

Report = Callable[[Record, int], None]
"""Called with the record of each shard that is done, and the number of all shards."""


@dataclasses.dataclass(frozen=True)
class TokenizeOptions:
    """How to tokenize."""

    tokenizer: str = BYTES  # `bytes`, a `tokenizer.json`, or a folder with one
    eos_token: str | None = None  # ends documents; None finds out
    bos_token: str | None = None  # begins documents; None finds out, "" uses none
    # how to find documents in files
    source: DocumentSource = dataclasses.field(default_factory=DocumentSource)
    # whether a document that cannot be read stops the run, or is counted and skipped
    on_error: OnError = "stop"
    piece_bytes: int = PIECE_BYTES  # about how much of a file becomes one shard

    def load_tokenizer(self) -> Tokenizer:
        """Loads the tokenizer."""
        return load_tokenizer(self.tokenizer, self.eos_token, self.bos_token)


@dataclasses.dataclass(frozen=True)
class ShardJob:
    """A piece that is to become a shard."""

    name: str
    piece: FilePiece
    options: TokenizeOptions
    folder: AnyPath


def run_jobs(jobs: Sequence[ShardJob], workers: int, report: Report) -> list[Record]:
    """The records of all jobs, in order."""
    records: dict[str, Record] = {}
    missing = []
    for job in jobs:
        record = _found_record(job)
        if record is None:
            missing.append(job)
        else:
            records[job.name] = record
            report(record, len(jobs))
    for record in _run_missing(missing, workers):
        records[record["name"]] = record
        report(record, len(jobs))
    return [records[job.name] for job in jobs]


def _run_missing(jobs: Sequence[ShardJob], workers: int) -> Iterator[Record]:
    if workers <= 1 or len(jobs) <= 1:
        yield from map(make_shard, jobs)
        return
    # Fresh processes: a copy of this one would have its threads' locks, but not its threads.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(min(workers, len(jobs)), context, _begin_worker)
    try:
        futures = [pool.submit(make_shard, job) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises has died, perhaps for want of memory; run again, with fewer "
            "--workers, and it goes on"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """Sets up a worker process: one tokenizer thread, and it ends when its parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def make_shard(job: ShardJob) -> Record:
    """Tokenizes one piece; its record is written last.

    Raises:
        DataError: a document cannot be read and must not be skipped.
    """
    options, tokenizer = job.options, job.options.load_tokenizer()
    dtype = shard_writer.token_dtype(tokenizer.vocab_size)
    # The byte tokenizer ends documents with the byte 0.
    forbidden = "\0" if options.tokenizer == BYTES else ""
    source = dataclasses.replace(options.source, forbidden=forbidden)
    bad: list[str] = []
    skipped = 0
    kinds: set[int] = set()  # how many documents rows have
    with shard_writer.ShardWriter(job.folder, job.name, dtype) as writer:
        for group in _grouped(documents.read(job.piece, source)):
            if isinstance(group, Bad):
                if options.on_error == "stop":
                    raise DataError(f"{group.message}; --on_error skip leaves such documents out")
                # The earlier parts of a long document may have been written already.
                writer.drop_open()
                skipped += 1
                bad += [group.message] if len(bad) < EXAMPLES else []
                continue
            kinds |= {item.row_documents for item in group}
            for item, tokens, learned in encoded(tokenizer, group, writer.is_open):
                writer.add(tokens, is_last=item.is_last, learned=learned)
        if len(kinds) > 1:
            raise DataError(f"{job.piece.path}: some rows are preferences, and some are not")
        record = writer.finish()
    record |= {"row_documents": kinds.pop()} if kinds - {1} else {}
    record |= {"file": str(job.piece.path), "skipped": skipped, "examples": bad}
    shard_writer.write_whole(record_path(job), as_json(record))
    return record


def _grouped(items: Iterable[DocumentText | Bad]) -> Iterator[list[DocumentText] | Bad]:
    """Collects texts into groups that are worth a call of the tokenizer; keeps the order."""
    group: list[DocumentText] = []
    size = 0
    for item in items:
        is_text = isinstance(item, DocumentText)
        if group and (not is_text or size >= ENCODED_AT_ONCE):
            yield group
            group, size = [], 0
        if isinstance(item, Bad):
            yield item
        else:
            group.append(item)
            size += len(item.text)
    if group:
        yield group


def encoded(
    tokenizer: Tokenizer, items: Sequence[DocumentText], is_open: bool = False
) -> Iterator[tuple[DocumentText, npt.NDArray[Any], Bools | None]]:
    """Tokens of texts (N,), with those that begin and end documents, and which are learned (N,).

    A token that has a character of an answer is learned, and so is what ends the answer's document.

    Args:
        is_open: whether the first text goes on with a document.
    """
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    batch = iter(tokenizer.encode_batch([item.text for item in items if item.learned is None]))
    for item in items:
        begin = bos if not (is_open or item.is_framed) else []
        end = [tokenizer.eos_id] if item.is_last and not item.is_framed else []
        is_open = not item.is_last
        if item.learned is None:
            yield item, np.concatenate([begin, next(batch), end]), None
            continue
        ids, places = tokenizer.encode_with_places(item.text)
        learned = np.zeros(len(ids), np.bool_)
        for start, stop in item.learned:
            learned |= (places[:, 0] < stop) & (places[:, 1] > start)
        marks = [np.zeros(len(begin), np.bool_), learned, np.ones(len(end), np.bool_)]
        yield item, np.concatenate([begin, ids, end]), np.concatenate(marks)


def record_path(job: ShardJob) -> AnyPath:
    """Where the record of a job's shard is."""
    return job.folder / f"{job.name}{RECORD}"


def _found_record(job: ShardJob) -> Record | None:
    """The record that an earlier run wrote for a shard, if the shard's files have its hashes."""
    try:
        record: Record = json.loads(record_path(job).read_text(encoding="utf-8"))
        hashes = shard_writer.shard_hashes(job.folder, record)
        found = {path: sha256_of(path) for path in hashes}
    except (OSError, ValueError):
        return None
    return record if found == hashes else None


def as_json(value: Any) -> bytes:
    """What is written of a record or a manifest."""
    return json.dumps(value, indent=2).encode() + b"\n"
