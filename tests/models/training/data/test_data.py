import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from spmd.models.training.data import source as data
from spmd.models.training.data.documents import DocumentSource
from spmd.models.training.data.shard_jobs import TokenizeOptions
from spmd.models.training.data.tokenize import tokenize
from spmd.models.training.paths import name_within


def text_of(corpus):
    return data.decode(corpus.read(0, len(corpus))[0])


def load(*sources, seq_len=16, **more):
    config = data.DataConfig(sources, **more)
    return data.load_datasets(config, seq_len=seq_len, batch_size=2, vocab_size=256)


def test_bytes_round_trip():
    assert data.decode(data.encode("naïve ∑ text\n")) == "naïve ∑ text\n"
    assert data.decode([0xFF, 65]) == "�A"


# Corpora


@pytest.mark.thorough
def test_standard_library_is_there_and_sorted():
    files = data.standard_library_files()
    assert files == sorted(files)
    assert "dataclasses.py" in {path.name for path in files}
    assert not [path for path in files if "site-packages" in path.parts or "test" in path.parts]


def test_corpus_is_capped_and_skips_what_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"aaaa")
    (tmp_path / "b.bin").write_bytes(b"b\0b")
    (tmp_path / "c.txt").write_bytes(b"cccc")
    files = data.find_files([str(tmp_path)])
    corpus = data.load_corpus(files)
    assert text_of(corpus) == "aaaa\0cccc\0"
    assert corpus.notes == (f"1 files have no text, {tmp_path / 'b.bin'} among them",)
    assert text_of(data.load_corpus(files, max_bytes=6)) == "aaaa\0cc\0"
    with pytest.raises(data.DataError, match="none of 1 files contains text"):
        data.load_corpus([tmp_path / "b.bin"])


def test_files_of_known_kinds_are_read_as_what_they_are(tmp_path):
    lines = "".join(json.dumps({"id": i, "text": f"naïve {i}"}) + "\n" for i in range(3))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"text": ["row 0", "row 1"], "id": [0, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"plain"))
    corpus = data.load_corpus(data.find_files([str(tmp_path)]))
    json_lines = "naïve 0\0naïve 1\0naïve 2\0"
    assert text_of(corpus) == f"{json_lines}{json_lines}row 0\0row 1\0plain\0"
    with pytest.raises(data.DataError, match="more than 20 bytes of text"):
        data.load_corpus([tmp_path / "b.jsonl.gz"], 20, whole=True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"body": "x"}\n', r"a.jsonl, line 1: no field 'text', only body; .*--field"),
        ("a.jsonl", b"no json\n", "a.jsonl, line 1: no valid JSON"),
        ("a.json", b'{"text": "a\\u0000b"}\n', r"line 1: .*which ends documents here"),
        ("a.parquet", b"PAR1", "is no Parquet file that can be read"),
        ("a.tar.gz", b"\x1f\x8b", "is no text: unpack or convert it"),
        ("a.pdf", b"%PDF", "is no text: unpack or convert it"),
    ],
)
def test_files_of_known_kinds_that_cannot_be_read(name, content, says, tmp_path):
    """They are refused, with the command that prepares them."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(data.DataError, match=says) as error:
        data.load_corpus([tmp_path / name])
    assert "scripts/tokenize_data --out TOKENS" in str(error.value) or "parquet" in name


def test_files_of_patterns_directories_and_names(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "c.md", "sub/d.txt"):
        (tmp_path / name).write_text(name)

    def found(*patterns):
        paths = data.find_files([str(tmp_path / pattern) for pattern in patterns])
        return [name_within(tmp_path, path) for path in paths]

    assert found("*.txt") == ["a.txt", "b.txt"]
    assert found("c.md", "sub", "c.md") == ["c.md", "sub/d.txt"]
    assert found("**/*.txt") == ["a.txt", "b.txt", "sub/d.txt"]
    with pytest.raises(data.DataError, match="no file matches"):
        found("c.md", "nothing")


# Datasets


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of tokens, of small letters and of capitals."""
    root = tmp_path_factory.mktemp("folders")
    for name, word in (("small", "abc "), ("capitals", "ABC ")):
        path = root / f"{name}.txt"
        path.write_text("|".join([word * 20] * 60))
        tokenize([path], root / name, TokenizeOptions(source=DocumentSource(separator="|")))
    return root


def test_standard_library_is_the_default():
    train, held_out = load(seq_len=128)
    assert train.parts[0].corpus is held_out.parts[0].corpus
    assert 0.03 < held_out.token_count / train.token_count < 0.07
    assert set(train(0)) == {"inputs", "targets"}


def test_text_as_it_is_equals_its_tokens(tmp_path):
    files = [tmp_path / "text" / name for name in ("a.txt", "b.txt")]
    files[0].parent.mkdir()
    for path in files:
        path.write_text(f"naïve {path.name}\n" * 100)
    tokenize(files, tmp_path / "tokens", TokenizeOptions())
    text, _ = load(str(tmp_path / "text"), packing="boundaries")
    tokens, _ = load(str(tmp_path / "tokens"), packing="boundaries")
    for name, leaf in text(3).items():
        assert (leaf == tokens(3)[name]).all(), name


def test_folders_are_mixed_by_their_shares_but_not_with_text(folders):
    train, held_out = load(f"{folders / 'small'}@0.75", f"{folders / 'capitals'}@0.25")
    for dataset in (train, held_out):
        rows = dataset.rows(range(400))["inputs"]
        is_small = (rows == ord("a")).any(axis=1)
        assert not (is_small & (rows == ord("A")).any(axis=1)).any()
        assert is_small.mean() == pytest.approx(0.75, abs=0.01)
    assert data.tokenizer_of(data.DataConfig([f"{folders / 'small'}@2"])).decode([97, 98]) == "ab"
    with pytest.raises(data.DataError, match=r"small.txt is text and .*capitals a folder"):
        load(str(folders / "small.txt"), str(folders / "capitals"))


def test_tokens_of_another_tokenizer_are_refused(folders, bpe, tmp_path):
    small = folders / "small"
    with pytest.raises(data.DataError, match=r"small are the bytes of the text, not of .*--token"):
        load(str(small), tokenizer=str(bpe))
    (tmp_path / "a.txt").write_text("the quick brown fox " * 400)
    tokenize([tmp_path / "a.txt"], tmp_path / "own", TokenizeOptions(tokenizer=str(bpe)))
    config = data.DataConfig((str(tmp_path / "own"),), tokenizer=str(bpe))
    data.load_datasets(config, seq_len=16, batch_size=2)
    other = json.loads(bpe.read_text())
    other["model"]["merges"] = other["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    config = data.DataConfig((str(tmp_path / "own"),), tokenizer=str(tmp_path))
    with pytest.raises(data.DataError, match="own are those of another tokenizer"):
        data.load_datasets(config, seq_len=16, batch_size=2)


def test_texts_that_are_no_data_set(tmp_path, monkeypatch, bpe):
    path = tmp_path / "a.txt"
    path.write_text("the quick brown fox " * 400)
    with pytest.raises(data.DataError, match=r"a.txt: its tokenizer has 300 ids.*256"):
        load(str(path), tokenizer=str(bpe))
    path.write_text("short " * 50)
    with pytest.raises(data.DataError, match=r"301 tokens are too few: a 20th is held out"):
        load(str(path))
    path.write_text("x" * 100)
    monkeypatch.setattr(data, "MEMORY_BYTES", 99)
    with pytest.raises(data.DataError, match=r"more than 99 bytes .* scripts/tokenize_data"):
        load(str(path))
