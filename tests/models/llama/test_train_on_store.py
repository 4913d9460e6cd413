"""scripts/train_llama.py with everything on an object store; programs that work on disks."""

import json

import pytest
import tokenizers

from spmd.models.llama.named import CONFIGS
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.sources import checkpoint_source, hf_source
from spmd.models.training.data.tokenizer import load_tokenizer, same_ids
from spmd.models.training.paths import file_sizes
from spmd.scripts import convert_checkpoints, export_llama, train_llama
from tests.models.llama.made import fresh_params
from tests.scripts.test_train_llama import own_settings as own_settings

TINY = CONFIGS["tiny"]


def run(s3, *flags):
    with pytest.raises(SystemExit) as ended:
        train_llama.main(
            [
                f"--init_from={s3}/model", f"--data={s3}/text.jsonl", f"--run_dir={s3}/run",
                "--mesh=data=2", "--seq_len=16", "--global_batch=4", "--steps=2",
                "--sample_tokens=0", "--eval_batches=0", "--watchdog_timeout=0", *flags,
            ]
        )  # fmt: skip
    return ended.value.code


def test_from_weights_to_weights(s3, tmp_path, capsys):
    weights.save(fresh_params(TINY, seed=2), TINY, s3 / "model")
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "to", "be", "or", "not"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="or"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (s3 / "model/tokenizer.json").write_text(tokenizer.to_str())
    text = "\n".join(json.dumps({"text": "to be or not to be " * 50}) for _ in range(60))
    (s3 / "text.jsonl").write_text(text)
    code = run(s3, f"--export_hf={s3}/out")
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"weights: {s3}/model" in printed
    assert f"exported: {s3}/out" in printed
    assert same_ids(load_tokenizer(f"{s3}/out"), load_tokenizer(f"{s3}/model"))
    assert json.loads((s3 / "run/config.json").read_text())["data"] == [f"{s3}/text.jsonl"]
    with hf_source(f"{s3}/out") as exported, checkpoint_source(f"{s3}/run") as saved:
        for name, tensor in saved.tensors.items():
            whole = tuple(slice(0, size) for size in tensor.shape)
            assert tensor.read(whole).tobytes() == exported.tensors[name].read(whole).tobytes()
        assert saved.tokenizer_from is not None
        assert (saved.tokenizer_from / "tokenizer.json").is_file()
    assert f"{s3}/out exists already; name a new" in run(s3, f"--export_hf={s3}/out")
    assert "run_dir" in str(run(s3))  # without --resume
    assert file_sizes(s3 / "run/checkpoints/2")


def test_programs_that_write_to_disks_say_so(capsys):
    for program, flags in (
        (export_llama, ["--model", "tiny", "--out", "s3://a/b"]),
        (convert_checkpoints, ["--from", "a", "--out", "gs://a/b"]),
    ):
        with pytest.raises(SystemExit):
            program.main(flags)
        assert "this program works on a disk: copy with the store's own tools" in (
            capsys.readouterr().err
        )
