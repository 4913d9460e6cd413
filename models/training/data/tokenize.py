"""Tokenizes text files into a folder, with several processes; a stopped run can be continued.

Every file is cut into pieces (`documents.cut`), and every piece becomes one shard. A shard whose
record is in the folder is done. The cut depends on the files and options alone, so a run that was
stopped and continued leaves the same files as one that was not.

    00000.tokens.bin  00000.index.npy  00000.shard.json     done
    00001.tokens.bin.4711.unfinished                        made again by the next run
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import dataclasses
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from models.training.data import documents, token_folder
from models.training.data.documents import Bad, Piece, Source, Text
from models.training.data.token_folder import MANIFEST, PLAN, UNFINISHED, Record
from models.training.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from models.training.errors import DataError
from models.training.paths import AnyPath, as_path, remove_tree

OnError = Literal["stop", "skip"]
ON_ERROR: tuple[OnError, ...] = ("stop", "skip")

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
class Options:
    """How to tokenize.

    Args:
        tokenizer: `bytes`, a `tokenizer.json`, or a folder with one.
        eos_token: ends documents; None finds out.
        bos_token: begins documents; None finds out, "" uses none.
        source: how to find documents in files.
        on_error: whether a document that cannot be read stops the run, or is counted and skipped.
        piece_bytes: about how much of a file becomes one shard.
    """

    tokenizer: str = BYTES
    eos_token: str | None = None
    bos_token: str | None = None
    source: Source = dataclasses.field(default_factory=Source)
    on_error: OnError = "stop"
    piece_bytes: int = PIECE_BYTES

    def load_tokenizer(self) -> Tokenizer:
        """Loads the tokenizer."""
        return load_tokenizer(self.tokenizer, self.eos_token, self.bos_token)


@dataclasses.dataclass(frozen=True)
class _Job:
    """A piece that is to become a shard."""

    name: str
    piece: Piece
    options: Options
    folder: AnyPath


def tokenize(
    files: Sequence[AnyPath],
    folder: AnyPath,
    options: Options,
    *,
    workers: int = 1,
    overwrite: bool = False,
    report: Report = lambda record, total: None,
) -> Record:
    """Tokenizes files into a folder; shards that an earlier run finished are kept.

    Args:
        files: what to read; their order is that of the documents.
        folder: where the tokens go.
        options: how to tokenize.
        workers: number of processes.
        overwrite: whether to replace a folder that holds tokens of something else.
        report: called for every shard that is done, including those of an earlier run.

    Returns:
        The manifest.

    Raises:
        DataError: a file cannot be read; a document cannot be read and `on_error` is `"stop"`;
            there is no document; or the folder holds something else.
    """
    folder = folder.absolute()
    plan = _plan(files, options)
    _prepare(folder, plan, overwrite)
    manifest_path = folder / MANIFEST
    if manifest_path.is_file():
        manifest: Record = json.loads(manifest_path.read_text(encoding="utf-8"))
        for record in manifest["shards"]:
            report(record, len(manifest["shards"]))
        return manifest
    tokenizer = options.load_tokenizer()
    jobs = _jobs(files, folder, options)
    manifest = _manifest(plan, options, tokenizer, _run(jobs, workers, report))
    if not manifest["totals"]["tokens"]:
        raise DataError(f"none of {len(files)} files contains a document")
    if options.tokenizer != BYTES:
        content = as_path(tokenizer.name).read_bytes()
        token_folder.write_whole(folder / token_folder.TOKENIZER, content)
    # From here on the folder is complete; a run that stops now leaves only files to tidy up.
    token_folder.write_whole(manifest_path, _json(manifest))
    for job in jobs:
        _record_path(job).unlink()
    (folder / PLAN).unlink()
    return manifest


# Planning


def _plan(files: Sequence[AnyPath], options: Options) -> Record:
    """Everything that decides the result; a folder with another plan cannot be continued."""
    about = dataclasses.asdict(options)
    about["tokenizer"] = options.load_tokenizer().sha256
    plan = {"options": about, "files": [_about_file(path) for path in files]}
    return {**plan, "sha256": hashlib.sha256(_json(plan)).hexdigest()}


def _about_file(path: AnyPath) -> Record:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _prepare(folder: AnyPath, plan: Record, overwrite: bool) -> None:
    """Makes the folder, or checks that what is in it belongs to the same plan."""
    found = _found_plan(folder)
    if found is not None and found != plan["sha256"] and not overwrite:
        raise DataError(
            f"{folder} holds tokens of other files, a file that has changed, or other options; "
            "name another folder, or replace it with --overwrite"
        )
    if found is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is there and holds something else; name another folder")
    if found is not None and found != plan["sha256"]:
        if isinstance(folder, Path):
            shutil.rmtree(folder)
        else:
            remove_tree(folder, MANIFEST)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"*{UNFINISHED}"):
        path.unlink(missing_ok=True)
    if not (folder / MANIFEST).is_file():
        token_folder.write_whole(folder / PLAN, _json(plan))


def _found_plan(folder: AnyPath) -> str | None:
    """The hash of the plan that made a folder; "" if it is damaged, None if there is none."""
    manifest, plan = folder / MANIFEST, folder / PLAN
    for path, key in ((manifest, "plan_sha256"), (plan, "sha256")):
        if path.is_file():
            try:
                return str(json.loads(path.read_text(encoding="utf-8"))[key])
            except (OSError, ValueError, KeyError, TypeError):
                return ""
    return None


def _jobs(files: Sequence[AnyPath], folder: AnyPath, options: Options) -> list[_Job]:
    pieces = [
        piece
        for path in files
        for piece in documents.cut(path, options.source, options.piece_bytes)
    ]
    return [_Job(f"{i:05d}", piece, options, folder) for i, piece in enumerate(pieces)]


# Running


def _run(jobs: Sequence[_Job], workers: int, report: Report) -> list[Record]:
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


def _run_missing(jobs: Sequence[_Job], workers: int) -> Iterator[Record]:
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
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def make_shard(job: _Job) -> Record:
    """Tokenizes one piece; its record is written last.

    Raises:
        DataError: a document cannot be read and must not be skipped.
    """
    options, tokenizer = job.options, job.options.load_tokenizer()
    dtype = token_folder.token_dtype(tokenizer.vocab_size)
    # The byte tokenizer ends documents with the byte 0.
    forbidden = "\0" if options.tokenizer == BYTES else ""
    source = dataclasses.replace(options.source, forbidden=forbidden)
    bad: list[str] = []
    skipped = 0
    with token_folder.ShardWriter(job.folder, job.name, dtype) as writer:
        for group in _grouped(documents.read(job.piece, source)):
            if isinstance(group, Bad):
                if options.on_error == "stop":
                    raise DataError(f"{group.message}; --on_error skip leaves such documents out")
                # The earlier parts of a long document may have been written already.
                writer.drop_open()
                skipped += 1
                bad += [group.message] if len(bad) < EXAMPLES else []
                continue
            _write(writer, group, tokenizer)
        record = writer.finish()
    record |= {"file": str(job.piece.path), "skipped": skipped, "examples": bad}
    token_folder.write_whole(_record_path(job), _json(record))
    return record


def _grouped(items: Iterable[Text | Bad]) -> Iterator[list[Text] | Bad]:
    """Collects texts into groups that are worth a call of the tokenizer; keeps the order."""
    group: list[Text] = []
    size = 0
    for item in items:
        is_text = isinstance(item, Text)
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


def _write(writer: token_folder.ShardWriter, group: list[Text], tokenizer: Tokenizer) -> None:
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    encoded = tokenizer.encode_batch([item.text for item in group])
    for item, ids in zip(group, encoded, strict=True):
        begin = bos if not writer.is_open else []
        end = [tokenizer.eos_id] if item.is_last else []
        writer.add(np.concatenate([begin, ids, end]), is_last=item.is_last)


# Records


def _record_path(job: _Job) -> AnyPath:
    return job.folder / f"{job.name}{RECORD}"


def _found_record(job: _Job) -> Record | None:
    """The record that an earlier run wrote for a shard, if the shard's files have its hashes."""
    try:
        record: Record = json.loads(_record_path(job).read_text(encoding="utf-8"))
        paths = token_folder.shard_paths(job.folder, job.name)
        hashes = [token_folder.sha256_of(path) for path in paths]
    except (OSError, ValueError):
        return None
    return record if hashes == [record["sha256"], record["index_sha256"]] else None


def _manifest(
    plan: Record, options: Options, tokenizer: Tokenizer, records: Sequence[Record]
) -> Record:
    counts = ("tokens", "documents", "skipped")
    files = []
    for about in plan["files"]:
        own = [record for record in records if record["file"] == about["path"]]
        files.append(about | {name: sum(record[name] for record in own) for name in counts})
    return {
        "schema_version": token_folder.SCHEMA_VERSION,
        "tokenizer": {
            "name": options.tokenizer,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "bos_id": tokenizer.bos_id,
        },
        "dtype": str(token_folder.token_dtype(tokenizer.vocab_size)),
        "totals": {name: sum(record[name] for record in records) for name in counts},
        "files": files,
        "shards": list(records),
        "options": plan["options"],
        "plan_sha256": plan["sha256"],
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
