"""scripts/train_llama.py as a whole, in this process: fine-tuning, restarts, failed exports."""

import collections
import json
import shutil
import sys

import jax
import pytest

from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.sources import checkpoint_source
from spmd.models.training.data.tokenizer import load_tokenizer, same_ids
from spmd.scripts import train_llama
from spmd.scripts.flags.train import make_parser
from tests.scripts.flags.test_weights import write_checkpoint


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    """What the script sets for its process is undone."""
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of weights with a tokenizer of some words, and a text of these words."""
    folder = tmp_path_factory.mktemp("trained")
    write_checkpoint(folder / "model")
    lines = [json.dumps({"text": "to be or not to be " * 50}) for _ in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def run(trained, tmp_path, *flags):
    """The exit code, and what was asked of the compilation cache."""
    asked: collections.Counter[str] = collections.Counter()

    def count(event, **_):
        asked.update([event.rpartition("/")[2]])

    jax.clear_caches()
    jax.monitoring.register_event_listener(count)
    try:
        with pytest.raises(SystemExit) as ended:
            train_llama.main(
                [
                    f"--init_from={trained / 'model'}", f"--data={trained / 'text.jsonl'}",
                    "--mesh=data=2", "--seq_len=16", "--global_batch=4", "--steps=4",
                    "--sample_tokens=0", "--eval_batches=1", f"--run_dir={tmp_path / 'run'}",
                    "--metrics=jsonl", "--watchdog_timeout=0", *flags,
                ]
            )  # fmt: skip
    finally:
        jax.monitoring.unregister_event_listener(count)
    return ended.value.code, asked


@pytest.mark.thorough
@pytest.mark.slow("four starts of the training script")
def test_fine_tuning_exports_and_restarts(trained, tmp_path, capsys, monkeypatch):
    """With the weights' tokenizer on JSON lines; a restart compiles nothing."""

    def fail(*_, **__):
        raise weights.WeightsError("no space is left")

    out = tmp_path / "new" / "folder" / "out"
    with monkeypatch.context() as full:
        full.setattr(weights, "save", fail)
        code, asked = run(trained, tmp_path, f"--export_hf={out}", "--save_every=2")
    printed = capsys.readouterr().out
    assert code == (
        f"error: no space is left; step 4 is in {tmp_path / 'run/checkpoints'}: with --resume the "
        "same command exports it"
    )
    assert asked["cache_misses"] > 2
    assert printed.index("step     0/4  held-out loss") < printed.index("step     1/4  loss")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (largest,) = {max(r["learning_rate"] for r in records if "learning_rate" in r)}
    assert largest == pytest.approx(2e-5)
    assert load_tokenizer(str(tmp_path / "run/tokenizer")).eos_id == 1
    assert not (tmp_path / "run/tensorboard").exists()
    again = make_parser("").parse_args(["--settings", str(tmp_path / "run/settings.yaml")])
    assert (again.steps, again.save_every, again.export_hf) == (4, 2, str(out))
    assert (again.mesh, again.data) == ({"data": 2}, (str(trained / "text.jsonl"),))

    # A start that goes on writes its report as the first one did.
    monkeypatch.setattr("spmd.models.training.trainer.Trainer.write_report", lambda *_, **__: None)
    other = f"--tokenizer={tmp_path / 'run/tokenizer'}"  # the same words under another path
    code, _ = run(trained, tmp_path, f"--export_hf={out}", "--resume", other)
    assert code == 0
    assert same_ids(load_tokenizer(str(out)), load_tokenizer(str(trained / "model")))
    assert (out / "tokenizer_config.json").exists()

    # The start before read a checkpoint for the first time.
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    capsys.readouterr()
    code, asked = run(trained, tmp_path, "--resume")
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "resuming after step 2" in printed
    assert "step     0/4" not in printed
    assert asked["cache_misses"] == 0 < asked["cache_hits"]

    code, _ = run(trained, tmp_path, "--resume", "--tokenizer=bytes", "--steps=5")
    assert code.startswith("error: the checkpoint was trained with another tokenizer")


@pytest.mark.thorough
@pytest.mark.slow("three starts of the training script")
def test_preferences_are_compared_with_the_first_weights_also_after_a_restart(
    trained, tmp_path, capsys
):
    pairs, valid = tmp_path / "pairs.jsonl", tmp_path / "valid.jsonl"
    rows = [{"prompt": "to be or ", "chosen": "not to be", "rejected": "be " * (i % 4)}
            for i in range(1, 24)]  # fmt: skip
    for path in (pairs, valid):
        path.write_text("\n".join(map(json.dumps, (row for row in rows if row["rejected"]))))
    flags = [f"--data={pairs}", f"--valid_data={valid}", "--save_every=2", "--learning_rate=1e-3"]
    code, _ = run(trained, tmp_path, *flags, "--init_from=", f"--tokenizer={trained / 'model'}")
    assert "the data are preferences: name the model that is tuned" in code

    def numbers():
        records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        return [[record[name] for name in ("loss", "rewards/margins", "logps/chosen")]
                for record in records if record["step"] == 4 and "loss" in record]  # fmt: skip

    assert run(trained, tmp_path, *flags)[0] == 0
    (found,) = numbers()
    assert found[0] != pytest.approx(0.6931, abs=1e-4) and found[1] != 0
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    assert run(trained, tmp_path, *flags, "--resume")[0] == 0
    assert numbers()[-1] == pytest.approx(found, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.slow("four starts of the training script")
def test_adapters_go_on_and_are_exported(trained, tmp_path, capsys):
    out = tmp_path / "adapters"
    adapters = ("--lora=rank=2,targets=q_proj+up_proj", "--metrics=", "--mesh=data=2,model=2")
    assert run(trained, tmp_path, *adapters, "--steps=2")[0] == 0
    export = ("--resume", f"--export_lora={out}", f"--export_hf={tmp_path / 'whole'}")
    assert run(trained, tmp_path, *adapters, *export)[0] == 0
    assert "resuming after step 2" in capsys.readouterr().out
    about = json.loads((out / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"]) == (2, 4)
    weights.check_can_load(tmp_path / "whole", read_config(tmp_path / "whole"))
    with (
        pytest.raises(weights.WeightsError, match="hold adapters alone"),
        checkpoint_source(tmp_path / "run"),
    ):
        pass
    other = (f"--init_from={tmp_path / 'whole'}", "--resume", "--steps=9")
    assert "frozen parameters, which checkpoints do not hold" in run(
        trained, tmp_path, *adapters, *other
    )[0]  # fmt: skip
    code, _ = run(trained, tmp_path, "--resume", f"--export_lora={tmp_path / 'none'}")
    assert "there are none without --lora" in code
