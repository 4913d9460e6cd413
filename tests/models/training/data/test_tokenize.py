import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.models.training.data import documents, token_folder
from spmd.models.training.data.documents import Bad, DocumentSource, DocumentText
from spmd.models.training.data.shard_jobs import TokenizeOptions
from spmd.models.training.data.tokenize import tokenize
from spmd.models.training.data.tokenizer import load_tokenizer
from spmd.models.training.errors import DataError
from tests.waiting import wait_until

ROOT = Path(__file__).parents[4]
TEXTS = [f"the quick brown fox {i} jumping over naïve dogs ∑ \n" * (i % 7 + 1) for i in range(60)]


def write_jsonl(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def write_parquet(path, texts=TEXTS):
    pa.parquet.write_table(pa.table({"text": texts}), path, row_group_size=7)
    return path


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def decoded(folder):
    corpus = token_folder.open_folder(folder)
    tokenizer = token_folder.folder_tokenizer(folder)
    found = []
    for shard in corpus.shards:
        for start, stop in zip(shard.index[:-1], shard.index[1:], strict=True):
            ids = shard.tokens[start:stop]
            assert ids[-1] == tokenizer.eos_id
            found.append(tokenizer.decode(ids[:-1]).removeprefix("<s>"))
    return found


# Formats


def test_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("naïve")
    manifest = tokenize([path], tmp_path / "out", TokenizeOptions())
    corpus = token_folder.open_folder(tmp_path / "out")
    assert corpus.read(0, len(corpus))[0].tolist() == [*"naïve".encode(), 0]
    assert corpus.shards[0].tokens.dtype == np.uint16
    assert manifest["totals"] == {"tokens": 7, "documents": 1, "skipped": 0}
    assert manifest["tokenizer"]["vocab_size"] == 256
    assert manifest["files"][0]["size"] == 6


def test_equals_direct_encoding(tmp_path, bpe):
    path = write_jsonl(tmp_path / "a.jsonl")
    tokenize([path], tmp_path / "out", TokenizeOptions(tokenizer=str(bpe), piece_bytes=1000))
    corpus = token_folder.open_folder(tmp_path / "out")
    import tokenizers

    direct = tokenizers.Tokenizer.from_file(str(bpe))
    bos, eos = direct.token_to_id("<s>"), direct.token_to_id("</s>")
    wanted = [[bos, *direct.encode(t, add_special_tokens=False).ids, eos] for t in TEXTS]
    assert len(corpus.shards) > 3
    assert corpus.read(0, len(corpus))[0].tolist() == [i for ids in wanted for i in ids]
    assert decoded(tmp_path / "out") == TEXTS


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_formats_and_compressions(tmp_path, workers):
    write_jsonl(tmp_path / "a.jsonl")
    write_parquet(tmp_path / "b.parquet")
    plain = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain))
    with pa.CompressedOutputStream(str(tmp_path / "d.jsonl.zst"), "zstd") as file:
        file.write(plain)
    (tmp_path / "e.txt").write_text("<end>".join(TEXTS))
    files = sorted(tmp_path.iterdir())
    options = TokenizeOptions(source=DocumentSource(separator="<end>"), piece_bytes=1500)
    manifest = tokenize(files, tmp_path / "out", options, workers=workers)
    assert decoded(tmp_path / "out") == TEXTS * 5
    assert [file["documents"] for file in manifest["files"]] == [60] * 5
    assert [s["file"] for s in manifest["shards"]].count(str(tmp_path / "b.parquet")) > 2


def test_long_documents_come_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)
    texts = ["naïve words\n" * 40, "é" * 500, "short"]
    path = tmp_path / "a.txt"
    path.write_text("<end>".join(texts))
    source = DocumentSource(separator="<end>")
    items = [text for p in documents.cut(path, source, 10**6) for text in documents.read(p, source)]
    assert len(items) > 10 and max(len(i.text) for i in items if isinstance(i, DocumentText)) < 200
    tokenize([path], tmp_path / "out", TokenizeOptions(source=source))
    assert decoded(tmp_path / "out") == texts


# Errors

BAD_LINES = [
    (b'{"text": "a"', r"no valid JSON: .* at column 13"),
    (b'{"text": "\xff"}', r"no valid UTF-8 at byte 10"),
    (b'{"other": "a"}', r"no field 'text', only other; name one with --field"),
    (b'["a"]', r"no field 'text', only a list"),
    (b'{"text": 3}', r"field 'text' is no text, but int"),
    (b'{"text": "\\ud800"}', r"half of a surrogate pair"),
    (b'{"text": "a\\u0000b"}', r"contains '\\x00', which ends documents"),
    (b"[" * 100_000, r"nested too deep"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_lines(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    good = b'{"text": "good"}\n'
    path.write_bytes(good * 10 + line + b"\n" + good * 3)
    for piece_bytes in (10**6, 50 + len(line) // 4):
        with pytest.raises(DataError, match=r"a.jsonl, line 11: .*" + message):
            tokenize(
                [path], tmp_path / f"stop{piece_bytes}", TokenizeOptions(piece_bytes=piece_bytes)
            )
    options = TokenizeOptions(on_error="skip", piece_bytes=50 + len(line) // 4)
    assert tokenize([path], tmp_path / "skip", options)["totals"]["skipped"] == 1
    assert decoded(tmp_path / "skip") == ["good"] * 13


def test_bad_text_leaves_nothing_of_its_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_bytes(b"first|" + b"many words\n" * 50 + b"\xff" + b"\nmore" * 50 + b"|last")
    options = TokenizeOptions(source=DocumentSource(separator="|"), on_error="skip")
    manifest = tokenize([path], tmp_path / "out", options)
    assert decoded(tmp_path / "out") == ["first", "last"]
    assert manifest["totals"]["skipped"] == 1
    (example,) = manifest["shards"][0]["examples"]
    assert "a.txt, in the text from line" in example and "no valid UTF-8" in example


def test_files_that_cannot_be_read(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["a", None, "b"])
    with pytest.raises(DataError, match=r"a.parquet, row 1: column 'text' is no text, but null"):
        tokenize([path], tmp_path / "out", TokenizeOptions())
    with pytest.raises(DataError, match=r"has no column 'body', only text"):
        tokenize([path], tmp_path / "other", TokenizeOptions(source=DocumentSource(field="body")))
    (tmp_path / "b.parquet").write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"b.parquet is no Parquet file"):
        tokenize([tmp_path / "b.parquet"], tmp_path / "cut", TokenizeOptions())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(os.urandom(4000).hex().encode())[:-200])
    with pytest.raises(DataError, match=r"a.txt.gz cannot be read"):
        tokenize([tmp_path / "a.txt.gz"], tmp_path / "archive", TokenizeOptions())
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(DataError, match="none of 1 files contains a document"):
        tokenize([tmp_path / "a.txt"], tmp_path / "nothing", TokenizeOptions())


def test_tokenizers_that_cannot_be_used(tmp_path, bpe):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"is no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match=r"nowhere: No such file"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"--eos_token: .* has no token '<eot>'"):
        load_tokenizer(str(bpe), "<eot>")


# Folders


def test_a_second_run_does_nothing(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    tokenize([path], tmp_path / "out", TokenizeOptions())
    before = content(tmp_path / "out")
    assert set(before) == {"manifest.json", "00000.tokens.bin", "00000.index.npy"}
    tokenize([path], tmp_path / "out", TokenizeOptions())
    assert content(tmp_path / "out") == before
    write_jsonl(path, TEXTS[:5])
    with pytest.raises(DataError, match=r"other files, a file that has changed.*--overwrite"):
        tokenize([path], tmp_path / "out", TokenizeOptions())
    tokenize([path], tmp_path / "out", TokenizeOptions(), overwrite=True)
    assert decoded(tmp_path / "out") == TEXTS[:5]
    with pytest.raises(DataError, match="holds something else"):
        tokenize([path], tmp_path, TokenizeOptions())


@pytest.mark.heavy
def test_killed_and_resumed(tmp_path, bpe):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 60)
    arguments = ["--tokenizer", str(bpe), "--piece_mib", "1", str(path)]
    path.write_text(path.read_text() * 6)
    run = [sys.executable, "-m", "spmd.scripts.tokenize_data", *arguments]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*run, "--out", whole, "--workers", "1"], cwd=ROOT, check=True)
    again = [*run, "--out", killed, "--workers", "2"]
    process = subprocess.Popen(again, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: list(killed.glob("*.shard.json")))
    process.send_signal(signal.SIGKILL)
    process.communicate()  # its processes are gone too: nobody holds the pipe any more
    done = list(killed.glob("*.shard.json"))
    assert done and not (killed / "manifest.json").exists()
    with pytest.raises(DataError, match=r"there is no manifest.json.*run it again"):
        token_folder.open_folder(killed)
    stamps = {path.name: path.stat().st_mtime_ns for path in killed.glob("*.tokens.bin")}
    subprocess.run(again, cwd=ROOT, check=True)
    assert content(killed) == content(whole)
    first = done[0].name.split(".")[0] + ".tokens.bin"
    assert (killed / first).stat().st_mtime_ns == stamps[first]


@pytest.fixture
def folder(tmp_path):
    tokenize([write_jsonl(tmp_path / "a.jsonl")], tmp_path / "out", TokenizeOptions())
    return tmp_path / "out"


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").write_text("{"), r"manifest.json is damaged"),
        (lambda f: change_manifest(f, shards=[{}]), r"manifest.json is damaged \(KeyError"),
        (lambda f: change_manifest(f, schema_version=2), r"of version 2, and only 1"),
        (lambda f: change_manifest(f, shards=[]), r"it holds no tokens"),
        (lambda f: (f / "00000.tokens.bin").unlink(), r"00000.tokens.bin: No such file"),
        (lambda f: os.truncate(f / "00000.tokens.bin", 10), r"has 10 bytes and should have"),
        (lambda f: os.truncate(f / "00000.index.npy", 100), r"00000.index.npy is damaged"),
        (lambda f: os.truncate(f / "00000.index.npy", 3), r"00000.index.npy is damaged"),
        (lambda f: np.save(f / "00000.index.npy", np.arange(3)), r"does not fit 60 documents"),
    ],
)
def test_damaged_folders(folder, damage, message):
    damage(folder)
    with pytest.raises(DataError, match=message):
        token_folder.open_folder(folder)


def test_flipped_bits_are_found_on_request(folder):
    assert list(token_folder.damages(folder)) == []
    path = folder / "00000.tokens.bin"
    whole = bytearray(path.read_bytes())
    whole[7] ^= 1
    path.write_bytes(whole)
    assert list(token_folder.damages(folder)) == [f"{path} has changed since it was written"]


def texts_of(piece, source):
    """The texts of a piece, all of which can be read."""
    for item in documents.read(piece, source):
        assert isinstance(item, DocumentText)
        yield item.text


SEPARATORS = ["|", "<>", "||", "aa"]


@given(
    st.lists(st.text("ab|<>é\n", max_size=12), max_size=12),
    st.sampled_from(SEPARATORS),
    st.integers(1, 40),
)
def test_pieces_of_text_are_its_documents(tmp_path_factory, texts, separator, piece_bytes):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_text(separator.join(texts))
    source = DocumentSource(separator=separator)
    pieces = documents.cut(path, source, piece_bytes)
    found = [text for piece in pieces for text in texts_of(piece, source)]
    assert found == [t for t in path.read_text().split(separator) if t.strip()]


@pytest.mark.thorough
@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 60), st.booleans())
def test_pieces_of_jsonl_are_its_lines(tmp_path_factory, texts, piece_bytes, ends):
    path = tmp_path_factory.getbasetemp() / "pieces.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join(lines) + "\n" * ends)
    pieces = documents.cut(path, DocumentSource(), piece_bytes)
    found = [item for piece in pieces for item in documents.read(piece, DocumentSource())]
    wanted: list[str | None] = []
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            wanted.append(None)
        else:
            wanted += [text] if text.strip() else []
    assert [None if isinstance(item, Bad) else item.text for item in found] == wanted
