"""Chats, answers and preferences: what is learned of them, in folders and in batches."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from spmd.models.training.data import chat, documents
from spmd.models.training.data.documents import DocumentSource
from spmd.models.training.data.shard_jobs import encoded
from spmd.models.training.data.source import DataConfig, load_datasets
from spmd.models.training.data.token_folder import damages, open_folder
from spmd.models.training.data.tokenizer import load_tokenizer
from spmd.models.training.errors import DataError
from spmd.scripts import tokenize_data

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}\n{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else '.' }}{% endfor %}"


def said(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CHATS = [{"messages": said(f"Why {i}?", "é" * (i % 5 + 1), "And?", f"No {i}.")} for i in range(60)]
PAIRS = [
    {"prompt": f"{i} + {i} = ", "chosen": f"{2 * i}", "rejected": "many, " * (i % 3 + 1)}
    for i in range(60)
]


def learned(answered):
    return [answered.text[start:stop] for start, stop in answered.learned]


@pytest.mark.parametrize("source", [PLAIN, MARKED])
def test_what_the_assistant_says_is_learned(source):
    (found,) = chat.read(CHATS[2], chat.Template(source))
    assert found.text == "<user>Why 2?\n<assistant>ééé\n<user>And?\n<assistant>No 2.\n"
    assert learned(found) == ["ééé\n", "No 2.\n"]
    assert found.is_framed


def test_answers_of_prompts_and_preferences():
    template = chat.Template(PLAIN)
    (found,) = chat.read({"prompt": said("a"), "completion": said("", "b")[1:]}, template)
    assert (found.text, learned(found)) == ("<user>a\n<assistant>b\n", ["b\n"])
    (found,) = chat.read({"prompt": "a ", "completion": "b"}, None)
    assert (found.text, learned(found), found.is_framed) == ("a b", ["b"], False)
    implicit = {"chosen": said("a", "b"), "rejected": said("a", "c")}
    explicit = {"prompt": said("a"), "chosen": said("a", "b")[1:], "rejected": said("a", "c")[1:]}
    assert chat.read(implicit, template) == chat.read(explicit, template)
    assert [learned(one) for one in chat.read(implicit, template)] == [["b\n"], ["c\n"]]


@pytest.mark.parametrize("source", [PLAIN, MARKED])
def test_masks_are_those_of_transformers(source, bpe):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe))
    found = theirs.apply_chat_template(
        CHATS[2]["messages"],
        chat_template=MARKED,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    items = documents.row_documents(
        CHATS[2], DocumentSource(template=chat.Template(source)), "field"
    )
    ((_, tokens, marks),) = encoded(load_tokenizer(str(bpe)), items)
    assert tokens.tolist() == found["input_ids"]
    assert marks is not None and marks.tolist() == [bool(x) for x in found["assistant_masks"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "no message of the assistant has a word",
        ),
        ({"messages": "a"}, "field 'messages' is no list of messages"),
        ({"messages": [{"content": "a"}]}, "message 0 has no text as its role"),
        ({"messages": [{"role": "user"}]}, "message 0 has no content"),
        ({"prompt": "a", "completion": ""}, "the answer is empty"),
        ({"prompt": "a", "completion": 3}, "'completion' is no text and no list of messages"),
        (
            {"prompt": "a", "completion": said("b")},
            "a prompt and what follows are both texts, or both",
        ),
        ({"prompt": "a", "chosen": "b"}, "no field 'text', only prompt, chosen; name one with"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [CHATS[0], row])))
    template = tmp_path / "template"
    template.write_text(PLAIN)
    flags = ["--out", str(tmp_path / "out"), "--chat_template", str(template), str(path)]
    with pytest.raises(SystemExit, match=rf"a\.jsonl, line 2: .*{message}"):
        tokenize_data.main(flags)


def test_templates_that_do_not_serve(tmp_path):
    with pytest.raises(ValueError, match="writes the first 2 messages otherwise where others foll"):
        chat.read(CHATS[0], chat.Template(FORGETFUL))
    with pytest.raises(ValueError, match="the tokenizer has no chat template; name"):
        chat.read(CHATS[0], None)
    (tmp_path / "bad").write_text("{% if")
    with pytest.raises(DataError, match="bad, line 1: "):
        chat.find_template("bytes", str(tmp_path / "bad"))


def tokenized(tmp_path, rows, name="rows.jsonl"):
    path, template = tmp_path / name, tmp_path / "template"
    template.write_text(PLAIN)
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / f"{name}.tokens"
    tokenize_data.main(
        ["--out", str(out), "--chat_template", str(template), "--workers=1", str(path)]
    )
    return out


def answers(batch, row, mask):
    found: dict[int, bytearray] = {}
    leaves = (batch[name][row] for name in ("targets", "segment_ids", mask))
    for token, segment, counts in zip(*leaves, strict=True):
        found.setdefault(int(segment), bytearray()).extend([token] if counts else [])
    return [bytes(x).rstrip(b"\0").decode() for x in found.values() if x]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_chats_are_packed_whole(tmp_path, name):
    folder = tokenized(tmp_path, CHATS, name)
    assert list(damages(folder)) == []
    train, held_out = load_datasets(DataConfig([str(folder)]), seq_len=160, batch_size=4)
    assert train.leaves == ("inputs", "targets", "segment_ids", "positions", "weights")
    seen = [
        text
        for data in (train, held_out)
        for row in map(data.windows[0].__getitem__, range(len(data.windows[0])))
        for text in answers({n: x[None] for n, x in row.items()}, 0, "weights")
    ]
    wanted = ["".join(m["content"] + "\n" for m in row["messages"][1::2]) for row in CHATS]
    assert sorted(seen) == sorted(wanted)
    assert len(train.windows[0]) < 40  # several fit into a sample
    (short, _) = load_datasets(DataConfig([str(folder)]), seq_len=20, batch_size=4)
    assert "are longer than 21 tokens, and lose their ends" in short.notes[0]
    (folder / "00000.learned.bin").write_bytes(b"\1" * 7)
    with pytest.raises(DataError, match=r"learned\.bin has 7 bytes and should have"):
        open_folder(folder)
    assert "learned.bin has changed" in next(damages(folder))


def test_preferences_are_pairs(tmp_path):
    folder = tokenized(tmp_path, PAIRS)
    train, held_out = load_datasets(
        DataConfig([str(folder)], valid=[str(folder)]), seq_len=63, batch_size=4
    )
    assert len(train.windows[0]) == len(held_out.windows[0]) == 60
    reference = np.arange(120, dtype=np.float32).reshape(60, 2)
    batch = dataclasses.replace(train, references=reference)(0)
    assert {name: x.shape for name, x in batch.items()} == {
        name: x.shape for name, x in train.struct().items()
    }
    for row in range(4):
        number = int(batch["reference_chosen"][row]) // 2
        assert batch["reference_rejected"][row] == 2 * number + 1
        assert answers(batch, row, "answers") == [
            PAIRS[number]["chosen"],
            PAIRS[number]["rejected"],
        ]
    short = load_datasets(DataConfig([str(folder)], valid=[str(folder)]), seq_len=23, batch_size=4)
    windows = short[0].windows[0]
    for window in range(len(windows)):
        assert {1, 2} <= set(windows[window]["segment_ids"])
    with pytest.raises(DataError, match="packed as pairs alone: leave out --packing"):
        load_datasets(DataConfig([str(folder)], packing="none"), seq_len=63, batch_size=4)


def test_data_of_one_s_own_to_evaluate_on(tmp_path):
    for name, text in (("a", "abc " * 200), ("b", "xyz " * 200)):
        (tmp_path / f"{name}.txt").write_text(text)
    paths = [str(tmp_path / f"{name}.txt") for name in "ab"]
    train, valid = load_datasets(
        DataConfig(paths[:1], valid=paths[1:]), seq_len=16, batch_size=2, seed=1
    )
    assert train.token_count == valid.token_count == 801
    assert set(valid(0)["inputs"].ravel()) <= set(b"xyz \0")
    chats = tokenized(tmp_path, CHATS)
    with pytest.raises(DataError, match="are of different kinds"):
        load_datasets(DataConfig([str(chats)], valid=[str(tokenized(tmp_path, PAIRS, "p.jsonl"))]),
                      seq_len=99, batch_size=2)  # fmt: skip
