"""Data on an object store: the same corpora and batches as on a disk, read by ranges."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from spmd.models.training.data import source as data
from spmd.models.training.data.documents import find_files
from spmd.models.training.data.shard_jobs import TokenizeOptions
from spmd.models.training.data.token_folder import damages, open_folder
from spmd.models.training.data.tokenize import tokenize
from spmd.models.training.errors import DataError
from spmd.models.training.paths import file_sizes
from spmd.scripts import tokenize_data

TEXTS = [f"{number} to be or not to be, that is the question. " * 40 for number in range(30)]


@pytest.fixture
def both(s3, tmp_path):
    """The same text in files of every kind, on a disk and on a store."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXTS[0])
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS[1:10])
    (folder / "b.jsonl").write_text(lines)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with pyarrow.output_stream(folder / "d.jsonl.zst", compression="zstd") as file:
        file.write(lines.encode())
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[10:]}), folder / "e.parquet")
    for path in folder.iterdir():
        (s3 / "text" / path.name).write_bytes(path.read_bytes())
    return folder, s3 / "text"


def test_text_of_every_kind(both):
    local, remote = both
    for here, there in ((local, remote), (f"{local}/*.jsonl*", f"{remote}/*.jsonl*")):
        configs = [data.DataConfig([str(where)]) for where in (here, there)]
        corpora = [data.open_sources(config)[0][0] for config in configs]
        assert corpora[0].fingerprint == corpora[1].fingerprint
    assert [path.name for path in find_files([f"{remote}/?.txt"])] == ["a.txt"]
    with pytest.raises(DataError, match="no file matches"):
        find_files([f"{remote}/*.md"])


def test_tokens_are_the_same_and_are_read_by_ranges(both, tmp_path, asked):
    local, remote = both
    out = remote.parent / "tokens"
    options = TokenizeOptions(piece_bytes=4096)
    tokenize(find_files([str(local)]), tmp_path / "tokens", options)
    with pytest.raises(DataError, match="holds something else"):
        tokenize(find_files([str(remote)]), remote, options)
    tokenize(find_files([str(remote)]), out, options, workers=2)
    assert set(file_sizes(out)) == {path.name for path in (tmp_path / "tokens").iterdir()}
    del asked[:]
    configs = [data.DataConfig([f"{folder}@2"]) for folder in (tmp_path / "tokens", out)]
    (here, held_out), (there, held_out_there) = (
        data.load_datasets(config, seq_len=64, batch_size=4) for config in configs
    )
    assert here.fingerprint == there.fingerprint
    assert not [name for name, *_ in asked if name.endswith(".bin")]
    for step in (0, 3):
        np.testing.assert_equal(there(step), here(step))
    np.testing.assert_equal(held_out_there(1), held_out(1))
    assert all(stop is not None for name, stop, _ in asked if name.endswith(".bin"))


def test_a_stopped_run_goes_on_and_damage_is_found(both, capsys):
    _, remote = both
    out = remote.parent / "tokens"
    arguments = ["--out", str(out), str(remote), "--workers", "1"]
    tokenize_data.main(arguments)
    whole = {name: (out / name).read_bytes() for name in file_sizes(out)}
    tokenize_data.main(["--verify", str(out)])
    assert "every file is as it was written" in capsys.readouterr().out
    (out / "00001.tokens.bin").write_bytes(whole["00001.tokens.bin"][::-1])
    assert [text.partition(".bin")[2] for text in damages(out)] == [
        " has changed since it was written"
    ]
    (out / "00001.tokens.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="has 5 bytes and should have"):
        open_folder(str(out))
    tokenize_data.main([*arguments, "--overwrite", "--piece_mib", "1"])
    assert whole["00000.tokens.bin"] == (out / "00000.tokens.bin").read_bytes()
