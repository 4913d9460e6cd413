"""Tokenizes text files into a folder, with several processes; a stopped run can be continued.

Every file is cut into pieces (`documents.cut`), and every piece becomes one shard. A shard whose
record is in the folder is done. The cut depends on the files and options alone, so a run that was
stopped and continued leaves the same files as one that was not.

    00000.tokens.bin  00000.index.npy  00000.shard.json     done
    00001.tokens.bin.4711.unfinished                        made again by the next run
"""

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from spmd.models.training.data import documents, shard_jobs, shard_writer
from spmd.models.training.data.shard_jobs import Report, ShardJob, TokenizeOptions, as_json
from spmd.models.training.data.shard_writer import MANIFEST, PLAN, UNFINISHED, Record
from spmd.models.training.data.tokenizer import BYTES, Tokenizer
from spmd.models.training.errors import DataError
from spmd.models.training.paths import AnyPath, as_path, remove_tree


def tokenize(
    files: Sequence[AnyPath],
    folder: AnyPath,
    options: TokenizeOptions,
    *,
    workers: int = 1,
    overwrite: bool = False,
    report: Report = lambda record, total: None,
) -> Record:
    """Tokenizes files into a folder; shards that an earlier run finished are kept.

    Args:
        files: what to read; their order is that of the documents.
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
    cuts = (documents.cut(path, options.source, options.piece_bytes) for path in files)
    pieces = itertools.chain.from_iterable(cuts)
    jobs = [ShardJob(f"{i:05d}", piece, options, folder) for i, piece in enumerate(pieces)]
    manifest = _manifest(plan, options, tokenizer, shard_jobs.run_jobs(jobs, workers, report))
    full = [record for record in manifest["shards"] if record["tokens"]]
    if len({record.get("row_documents", 1) for record in full}) > 1:
        raise DataError("some files are preferences, and some are not: make a folder of each kind")
    if not manifest["totals"]["tokens"]:
        raise DataError(f"none of {len(files)} files contains a document")
    if options.tokenizer != BYTES:
        content = as_path(tokenizer.name).read_bytes()
        shard_writer.write_whole(folder / shard_writer.TOKENIZER, content)
    # From here on the folder is complete; a run that stops now leaves only files to tidy up.
    shard_writer.write_whole(manifest_path, as_json(manifest))
    for job in jobs:
        shard_jobs.record_path(job).unlink()
    (folder / PLAN).unlink()
    return manifest


def _plan(files: Sequence[AnyPath], options: TokenizeOptions) -> Record:
    """Everything that decides the result; a folder with another plan cannot be continued."""
    about = dataclasses.asdict(options)
    about["tokenizer"] = options.load_tokenizer().sha256
    if options.source.template is None:  # as in folders that were made before there were any
        del about["source"]["template"]
    found = []
    for path in files:
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        found.append({"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns})
    plan = {"options": about, "files": found}
    return {**plan, "sha256": hashlib.sha256(as_json(plan)).hexdigest()}


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
        shard_writer.write_whole(folder / PLAN, as_json(plan))


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


def _manifest(
    plan: Record, options: TokenizeOptions, tokenizer: Tokenizer, records: Sequence[Record]
) -> Record:
    counts = ("tokens", "documents", "skipped")
    files = []
    for about in plan["files"]:
        own = [record for record in records if record["file"] == about["path"]]
        files.append(about | {name: sum(record[name] for record in own) for name in counts})
    return {
        "schema_version": shard_writer.SCHEMA_VERSION,
        "tokenizer": {
            "name": options.tokenizer,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "bos_id": tokenizer.bos_id,
        },
        "dtype": str(shard_writer.token_dtype(tokenizer.vocab_size)),
        "totals": {name: sum(record[name] for record in records) for name in counts},
        "files": files,
        "shards": list(records),
        "options": plan["options"],
        "plan_sha256": plan["sha256"],
    }
