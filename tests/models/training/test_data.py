import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.training import data

TEXT = data.encode("".join(chr(33 + i % 90) for i in range(1000)))


def test_bytes_round_trip():
    assert data.decode(data.encode("naïve ∑ text\n")) == "naïve ∑ text\n"
    assert data.decode([0xFF, 65]) == "�A"


# Samples


def test_targets_are_the_inputs_one_token_on():
    batch = data.TokenWindows(TEXT, seq_len=16, batch_size=4, seed=3)(0)
    assert batch["inputs"].shape == batch["targets"].shape == (4, 16)
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_windows_are_of_the_corpus():
    for row in data.TokenWindows(TEXT, seq_len=16, batch_size=4)(5)["inputs"]:
        assert data.decode(row) in data.decode(TEXT)


def test_a_batch_is_a_function_of_seed_and_step():
    def batch(seed, step):
        return data.TokenWindows(TEXT, seq_len=16, batch_size=4, seed=seed)(step)["inputs"]

    np.testing.assert_array_equal(batch(1, 7), batch(1, 7))
    assert not np.array_equal(batch(1, 7), batch(1, 8))
    assert not np.array_equal(batch(1, 7), batch(2, 7))


def test_batches_do_not_depend_on_the_order_of_access():
    windows = data.TokenWindows(TEXT, seq_len=16, batch_size=4, seed=1)
    forward = [windows(step)["inputs"] for step in range(4)]
    backward = [windows(step)["inputs"] for step in reversed(range(4))]
    np.testing.assert_array_equal(forward, backward[::-1])


def test_first_batch_is_pinned():
    """A change here would silently change what every resumed run sees."""
    windows = data.TokenWindows(np.arange(200, dtype=np.uint8), seq_len=2, batch_size=4, seed=0)
    assert windows(0)["inputs"][:, 0].tolist() == [168, 126, 101, 53]


def test_smallest_corpus():
    smallest = data.TokenWindows(TEXT[:5], seq_len=4, batch_size=2)
    np.testing.assert_array_equal(smallest(0)["targets"][0], TEXT[1:5])
    with pytest.raises(data.DataError, match=r"has 5 tokens.*need at least 6"):
        data.TokenWindows(TEXT[:5], seq_len=5, batch_size=2)


def test_struct_is_that_of_a_batch():
    windows = data.TokenWindows(TEXT, seq_len=16, batch_size=4)
    jax.tree.map(
        lambda leaf, struct: (leaf.shape, leaf.dtype) == (struct.shape, struct.dtype) or 1 / 0,
        windows(0),
        windows.struct(),
    )


def test_place_puts_each_device_its_rows(devices8):
    mesh = jax.sharding.Mesh(np.array(devices8), ("data",))
    batch = data.TokenWindows(TEXT, seq_len=6, batch_size=8)(0)
    placed = data.place(batch, {name: NamedSharding(mesh, P("data", None)) for name in batch})
    np.testing.assert_array_equal(placed["inputs"], batch["inputs"])
    assert {shard.data.shape for shard in placed["inputs"].addressable_shards} == {(1, 6)}


# Corpora


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
    assert data.load_corpus(files).tobytes() == b"aaaa\0cccc\0"
    assert data.load_corpus(files, max_bytes=6).tobytes() == b"aaaa\0cc\0"
    with pytest.raises(data.DataError, match="none of 1 files contains text"):
        data.load_corpus([tmp_path / "b.bin"])


def test_files_of_patterns_directories_and_names(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "c.md", "sub/d.txt"):
        (tmp_path / name).write_text(name)

    def found(*patterns):
        paths = data.find_files([str(tmp_path / pattern) for pattern in patterns])
        return [str(path.relative_to(tmp_path)) for path in paths]

    assert found("*.txt") == ["a.txt", "b.txt"]
    assert found("c.md", "sub", "c.md") == ["c.md", "sub/d.txt"]
    assert found("**/*.txt") == ["a.txt", "b.txt", "sub/d.txt"]
    with pytest.raises(data.DataError, match="no file matches"):
        found("c.md", "nothing")


@pytest.mark.parametrize("length", [100, 5_000_000])
def test_held_out_tokens_are_the_rest(length):
    tokens = np.random.default_rng(0).integers(0, 256, length).astype(np.uint8)
    train, held_out = data.split_held_out(tokens)
    assert len(train) + len(held_out) == length
    assert 0.03 < len(held_out) / length < 0.07
    both = np.bincount(train, minlength=256) + np.bincount(held_out, minlength=256)
    np.testing.assert_array_equal(both, np.bincount(tokens, minlength=256))
