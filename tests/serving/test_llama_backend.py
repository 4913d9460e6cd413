"""A Llama exported with scripts/export_llama and run from its bundle: transformers' tokens."""

import json

import jax
import numpy as np
import pytest

import spmd
from models.llama import quantize
from models.llama.decode import ServingShape
from models.llama.weights.sources import hf_source
from scripts import export_llama as script
from serving import llama_backend as llama
from serving import llama_bundle
from serving.bundle.read import load_bundle
from serving.engine.backend import Limits, Sampling
from serving.engine.model_backend import generate
from tests.models.llama.inverse import dequantize
from tests.models.llama.weights import checkpoints

pytest.importorskip("torch")
pytest.importorskip("transformers")

SHAPE = ServingShape(2, 48, (8,), (48,), 4, 2, "float32")
FUNCTIONS = ("decode_t48", "prefill_s8_t48", "copy_t48")
FLAGS = [
    "--slots=2", "--max_length=48", "--prefill=8", "--length=48", "--decode_steps=4",
    "--top_logprobs=2", "--dtype=float32", "--platforms=cpu",
]  # fmt: skip


@pytest.fixture
def export(capsys):
    """Runs the script; returns what it prints, or its error."""

    def run(*arguments):
        try:
            script.main([*FLAGS, *map(str, arguments)])
        except SystemExit as stopped:
            return f"{stopped.code} {capsys.readouterr().err}"
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "grouped"
    checkpoints.write("grouped", path, num_hidden_layers=1, eos_token_id=[3, 5])
    (path / "tokenizer.json").write_text("{}")
    return path


PROMPT = checkpoints.TOKENS_BS[0, :11].tolist()


def test_tokens_are_transformers(hf_folder, tmp_path, export, devices8):
    """Two key heads on eight devices: they are split over a part of the axis."""
    out = tmp_path / "bundle"
    assert "exported: " in export("--init_from", hf_folder, "--out", out)
    bundle = load_bundle(out, spmd.make_mesh(model=8, devices=devices8), functions=FUNCTIONS)
    assert bundle.weights["weights/layers/0/self_attn/q_proj/weight"].addressable_shards[
        0
    ].data.shape == (4, 32)
    expected = checkpoints.their_continuation(hf_folder, PROMPT, 8)
    assert generate(llama.model_backend(bundle), PROMPT, 8)[0] == expected
    bundle.reset_state()
    assert tokens_of_backend(bundle) == expected
    contract = bundle.manifest.contract
    assert contract["eos_token_ids"] == [3, 5]
    assert ServingShape(**contract["shape"])._replace(chunks=(8,), lengths=(48,)) == SHAPE
    assert contract["model"]["num_key_value_heads"] == 2
    assert set(bundle.functions) == set(FUNCTIONS)
    assert "tokenizer/tokenizer.json" in bundle.manifest.tokenizer


def tokens_of_backend(bundle):
    """The same through what the engine calls."""
    backend = llama.model_backend(bundle)
    assert backend.limits == Limits(2, 48, (8,), 4, 2, 128)
    greedy = Sampling(temperature=0)
    backend.prefill(1, PROMPT[:8], 0)
    first = backend.prefill(1, PROMPT, 8, sampling=greedy)().first
    assert first is not None
    calls = [backend.decode([False, True], steps) for steps in (4, 3)]  # both are under way
    made = [call().ids[:, 1].tolist() for call in calls]
    assert backend.compile_total == 4  # three functions and the state
    return [*first.ids.tolist(), *made[0], *made[1]]


def test_goldens_and_random_weights(tmp_path, export, monkeypatch, devices8):
    monkeypatch.setattr(jax, "devices", lambda: devices8[:1])
    prompts = tmp_path / "prompts"
    prompts.write_text("abc\n\n")
    out = tmp_path / "bundle"
    export("--model=tiny", "--out", out, "--golden_prompts", prompts, "--quantize=int4")
    manifest = json.loads((out / "manifest.json").read_text())
    (made,) = manifest["goldens"]
    assert made["prompt"] == list(b"abc")
    assert len(made["tokens"]) == len(made["logprobs"]) == 8
    assert manifest["quantization"] == {"kind": "int4", "group": quantize.GROUP}
    assert len(set(manifest["functions"]["decode_t48"]["modules"])) == 1


@pytest.mark.parametrize("kind", ["none", "int8", "fp8"])
def test_weights_are_read_one_by_one(kind, hf_folder):
    with hf_source(hf_folder) as source:
        tree = llama_bundle.serving_weights(source, "bfloat16", kind)
        found = {
            name: np.asarray(tree["layers"]["0"]["mlp"]["up_proj"][name])
            for name in tree["layers"]["0"]["mlp"]["up_proj"]
        }
        exact = np.asarray(source.tensors["model.layers.0.mlp.up_proj.weight"])
        assert np.asarray(tree["norm"]["weight"]).dtype.name == "bfloat16"
    whole = found["weight"] if kind == "none" else dequantize(found)
    np.testing.assert_allclose(whole.astype(np.float32), exact, rtol=0.07, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: name one model, with --init_from, --run_dir or --model"),
        (("--model=tiny", "--run_dir=x"), "not with --run_dir and --model"),
        (("--model=huge",), "error: no model is called 'huge'"),
        (("--init_from=/nowhere",), "error: "),
        (("--run_dir=/nowhere",), "error: /nowhere is no folder of a run"),
        (("--model=tiny", "--length=32"), "error: --length: the last, 32, has to be --max_length"),
        (("--model=tiny", "--prefill=9,8"), "error: --prefill: [9, 8] are no ascending"),
        (("--model=tiny", "--prefill=x"), "invalid numbers value: 'x'"),
        (("--model=tiny", "--tokenizer=/nowhere"), "error: /nowhere holds no tokenizer"),
        (("--model=tiny", "--platforms=wasm"), "error: --platforms: 'wasm' is not among"),
    ],
)
def test_errors_of_the_script(arguments, message, tmp_path, export):
    assert message in export("--out", tmp_path / "b", *arguments)
    assert not list(tmp_path.iterdir())
