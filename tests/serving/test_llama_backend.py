"""A Llama exported with scripts/export_llama and run from its bundle: transformers' tokens."""

import argparse
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import spmd
from spmd.models.decode import ServingShape
from spmd.models.decode.packing import row_shapes, width
from spmd.models.decode.shape import PIECES, default_rows
from spmd.models.llama import quantize
from spmd.models.llama.weights.sources import hf_source
from spmd.models.training.data.tokenizer import load_tokenizer
from spmd.scripts import export_llama as script
from spmd.serving import language_backend as language
from spmd.serving import llama_bundle
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import LeafEntry
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.write import tokenizer_files
from spmd.serving.engine.backend import Limits, Sampling, SlotPart
from spmd.serving.engine.model_backend import budget, generate
from tests.models.llama.weights import checkpoints
from tests.models.training.data.test_beginnings import byte_level, saved

pytest.importorskip("torch")
pytest.importorskip("transformers")

SHAPE = ServingShape(4, 48, (2, 8), (48,), 8, 2, 2, "float32")
FUNCTIONS = ("begin", "step_r2_t48", "step_r8_t48")
FLAGS = [
    "--slots=4", "--max_length=48", "--rows=2,8", "--length=48", "--page=8", "--groups=2",
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


@pytest.mark.thorough
@pytest.mark.slow("it imports transformers and writes a bundle")
def test_tokens_are_transformers(hf_folder, tmp_path, export, devices8):
    """Two key heads on eight devices: they are split over a part of the axis."""
    out = tmp_path / "bundle"
    assert "exported: " in export("--init_from", hf_folder, "--out", out)
    bundle = load_bundle(out, spmd.make_mesh(model=8, devices=devices8), functions=FUNCTIONS)
    assert bundle.weights["weights/layers/0/self_attn/q_proj/weight"].addressable_shards[
        0
    ].data.shape == (4, 32)
    expected = checkpoints.their_continuation(hf_folder, PROMPT, 8)
    assert generate(language.model_backend(bundle), PROMPT, 8)[0] == expected
    bundle.reset_state()
    assert tokens_of_backend(bundle) == expected
    contract = bundle.manifest.contract
    assert contract["eos_token_ids"] == [3, 5]
    found = ServingShape(**contract["shape"])
    assert found._replace(rows=tuple(found.rows), lengths=tuple(found.lengths)) == SHAPE._replace(
        turns=4
    )
    assert contract["model"]["num_key_value_heads"] == 2
    assert set(bundle.functions) == set(FUNCTIONS)
    assert "tokenizer/tokenizer.json" in bundle.manifest.tokenizer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "part", "shape", "composite"),
    [
        pytest.param(
            "qwen2", "1/self_attn/q_proj/bias", (8,), "spmd.paged_attention",
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            "gpt_oss", "1/self_attn/sinks", (1,), "spmd.experts", marks=pytest.mark.heavy
        ),
        ("mixtral", "0/mlp/experts/up_proj/weight", (4, 12, 32), "spmd.experts"),
    ],
)  # fmt: skip
def test_a_relatives_tokens_are_transformers(
    variant, part, shape, composite, tmp_path, export, devices8
):
    """Biases, windows of some layers and experts, in what is exported."""
    hf, out = tmp_path / "hf", tmp_path / "bundle"
    # Of two layers of others one has a window; mixtral's are all alike.
    checkpoints.write(variant, hf, num_hidden_layers=1 + (variant != "mixtral"))
    (hf / "tokenizer.json").write_text("{}")
    assert "exported: " in export("--init_from", hf, "--out", out)
    bundle = load_bundle(
        out, spmd.make_mesh(data=2, model=4, devices=devices8), functions=FUNCTIONS
    )
    assert bundle.weights[f"weights/layers/{part}"].addressable_shards[0].data.shape == shape
    assert composite in bundle.manifest.functions["step_r8_t48"].composites
    expected = checkpoints.their_continuation(hf, PROMPT, 16)
    assert generate(language.model_backend(bundle), PROMPT, 16)[0] == expected
    assert bundle.manifest.contract["model"]["model_type"] == variant
    if variant == "mixtral":
        found = export("--init_from", hf, "--out", tmp_path / "out", "--quantize=int4")
        assert "error: int4: weights of experts cannot be quantized so; use int8 or fp8" in found


def tokens_of_backend(bundle):
    """The same through what the engine calls: a slot of the second group."""
    backend = language.model_backend(bundle)
    assert bundle.symbols == {"pages": 12}  # no more than its slots can fill
    assert backend.limits == Limits(4, 48, (2, 8), 2, 8, 12, 2, 128, drafts=7, turns=4)
    assert backend.budget == 8
    backend.begin(3, Sampling(temperature=0), PROMPT)
    pages = (11, 3, 7)
    calls = [
        backend.step([SlotPart(3, 0, tuple(PROMPT[:8]), pages, False)]),
        backend.step([SlotPart(3, 8, tuple(PROMPT[8:]), pages, True)]),
        # All are under way before the first token is known.
        *(backend.step([SlotPart(3, len(PROMPT) + i, None, pages, True)]) for i in range(7)),
    ]
    made = [call().drawn.ids.tolist() for call in calls]
    assert backend.compile_total == 4  # three functions and the state
    return [token for tokens in made for token in tokens]


def check_bytes_that_a_step_reads(out, devices8):
    mesh = spmd.make_mesh(data=2, model=4, devices=devices8)
    bundle = load_bundle(out, mesh, functions=("begin",))
    facts = language.info(bundle)
    # Two layers; of two key heads one is on a device, of two groups one: values and scales.
    assert facts["token_bytes"] == 2 * 2 * (8 + 4) / 2
    read = sum(
        x.addressable_shards[0].data.nbytes
        for path, x in bundle.weights.items()
        if "embed" not in path
    )
    assert facts["read_weight_bytes"] == read < facts["weight_bytes"]
    cache = [x for path, x in bundle.state.items() if "cache" in path]
    assert sum(x.nbytes for x in cache) == 2 * 2 * 12 * 8 * 2 * 2 * (8 + 4)


@pytest.mark.parametrize(
    ("seconds", "slots", "rows"),
    [
        ({8: 1.0, 128: 1.1, 512: 2.0, 2048: 5.0}, 8, 512),
        ({8: 1.0, 128: 3.1, 512: 4.0}, 8, 128),  # all slots and a piece, however long it takes
        ({16: 1.0, 256: 2.5, 512: 6.0}, 256, 512),
        ({8: 0.002, 256: 0.011, 512: 0.021, 1024: 0.041}, 8, 512),  # short for whoever reads
        ({16: 1.0, 64: 2.5, 256: 3.0, 1024: 5.0}, 64, 1024),  # beside all slots, not beside few
        ({64: 1.0}, 64, 64),
    ],
)
def test_a_step_that_decoding_waits_for(seconds, slots, rows):
    assert budget(seconds, slots) == rows


def step_inputs(tags):
    if tags["kind"] != "step":
        return ()
    wide = width(row_shapes(8, tags["rows"], tags["length"] // 8))
    return (
        LeafEntry("inputs/alternatives", (), "bool"),
        LeafEntry("inputs/rows", (1, wide), "int32"),
    )


def stand_in(platform, **shape):
    """What `model_backend` reads of a bundle; over long tables steps read 160 tokens, 4 seconds."""
    sizes = {"slots": 8, "max_length": 64, "rows": [8, 256, 1024], "groups": 1, "page": 8}
    contract = {
        "kind": language.KIND,
        "shape": {**sizes, "top_logprobs": 1, **shape},
        "model": {"vocab_size": 9},
    }
    taken = {8: 0.1, 256: 0.2, 1024: 0.8}
    tags = {f"step_r{n}_t{t}": {"kind": "step", "rows": n, "length": t}
            for n in taken for t in (16, 64)}  # fmt: skip
    tags |= {name: {"kind": name} for name in ("begin", "allow")}
    entries = {n: SimpleNamespace(name=n, tags=t, inputs=step_inputs(t)) for n, t in tags.items()}
    seconds = {
        name: taken[entry.tags["rows"]] + (0 if "t16" in name else 4)
        for name, entry in entries.items()
        if "rows" in entry.tags
    }
    return SimpleNamespace(
        manifest=SimpleNamespace(contract=contract, name="x", functions=dict(entries)),
        symbols={"pages": 20},
        functions=entries,
        programs={
            name: SimpleNamespace(
                entry=entry, emitted=SimpleNamespace(seconds=seconds.get(name, 0))
            )
            for name, entry in entries.items()
        },
        devices=[SimpleNamespace(platform=platform)],
    )


@pytest.mark.parametrize(("bandwidth", "rows"), [(None, 1024), (40, 256)])
def test_predicted_times_decide_the_budget(bandwidth, rows, monkeypatch):
    monkeypatch.setattr(language, "info", lambda bundle: {"token_bytes": 1, "bandwidth": bandwidth})
    bundle = stand_in("gpu")
    backend = language.model_backend(bundle)
    assert backend.budget == rows
    del bundle.programs["step_r256_t64"]  # as if it were still to be compiled
    backend.seconds = language.step_seconds(bundle, backend.limits, backend.info)
    assert backend.budget == 1024


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"rows": None}, "NoneType"),
        ({"rows": []}, "index"),
        ({"groups": 0}, "positive"),
        ({"groups": 3}, "do not fit"),
        ({"slots": 2000}, "do not fit"),
    ],
)
def test_contracts_that_are_broken(shape, message, monkeypatch):
    monkeypatch.setattr(language, "info", lambda bundle: {})
    with pytest.raises(BundleError, match=f"older than this program .*{message}.*: export the"):
        language.model_backend(stand_in("cpu", **shape))


def test_functions_that_are_loaded_first():
    manifest = stand_in("cpu").manifest
    first = ["allow", "begin", "step_r1024_t64", "step_r8_t64"]
    assert sorted(language.first_functions(manifest)) == first
    scores = {"kind": "score", "rows": 1024, "length": 64}  # as the largest step does not
    manifest.functions["score"] = SimpleNamespace(tags=scores)
    assert sorted(language.first_functions(manifest)) == ["allow", "begin", "score", "step_r8_t64"]


def test_gpus_need_no_steps_of_short_tables():
    model = {"num_attention_heads": 8, "num_key_value_heads": 2}
    shape = {"max_length": 64, "page": 16, "cache_dtype": "bfloat16"}
    tags = {"begin": {}, "a": {"length": 64}, "b": {"length": 16}}
    for head, platform, names in ((64, "cuda", "begin a"), (96, "cuda", ""), (64, "tpu", "")):
        contract = {"kind": language.KIND, "model": {**model, "head_dim": head}, "shape": shape}
        found = language.served_functions(contract, tags, platform)
        assert " ".join(found) == (names or "begin a b")


def test_functions_that_are_not_there_or_are_others(monkeypatch):
    monkeypatch.setattr(language, "info", lambda bundle: {})
    older = {"inputs": (LeafEntry("inputs/tokens", (1, 8), "int32"),)}
    for edit, message in (
        (lambda b: b.functions.pop("begin"), "there is no function begin"),
        (lambda b: b.manifest.functions.pop("allow"), "there is no function allow.*: export the"),
        (lambda b: vars(b.functions["step_r8_t16"]).update(older), "other inputs than .*: export"),
    ):
        edit(bundle := stand_in("cpu"))
        with pytest.raises(BundleError, match=message):
            language.model_backend(bundle)


@pytest.mark.thorough
def test_goldens_random_weights_and_a_small_cache(tmp_path, export, monkeypatch, devices8):
    prompts = tmp_path / "prompts"
    prompts.write_text("abc\n\n")
    out = tmp_path / "bundle"
    with monkeypatch.context() as alone:
        alone.setattr(jax, "devices", lambda: devices8[:1])
        # It is kept for whoever asks next.
        alone.setattr("spmd.mesh.mesh.devices_by_id", lambda: {devices8[0].id: devices8[0]})
        export(
            "--model=tiny", "--rows=8", "--out", out, "--golden_prompts", prompts,
            "--quantize=int4", "--cache_dtype=int8",
        )  # fmt: skip
    manifest = json.loads((out / "manifest.json").read_text())
    (made,) = manifest["goldens"]
    assert made["prompt"] == list(b"abc")
    assert len(made["tokens"]) == len(made["logprobs"]) == 8
    assert manifest["quantization"] == {"kind": "int4", "group": quantize.GROUP}
    assert len(set(manifest["functions"]["step_r8_t48"]["modules"])) == 1
    check_bytes_that_a_step_reads(out, devices8)


def test_bundles_of_runs_begin_texts_as_training_did(tmp_path):
    folder = saved(byte_level(), tmp_path)

    def shipped(run_dir):
        given = argparse.Namespace(run_dir=run_dir, tokenizer=folder)
        with script.shipped_tokenizer(given) as found:
            assert set(tokenizer_files(found)) == {"tokenizer.json", "tokenizer_config.json"}
            return load_tokenizer(str(found)).begins

    assert (shipped(None), shipped("runs/a")) == ((), (0,))


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
    whole = found["weight"] if kind == "none" else quantize.dequantize(found)
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
        (("--model=tiny", "--rows=9,8"), "error: --rows: [9, 8] are no ascending"),
        (("--model=tiny", "--rows=x"), "invalid numbers value: 'x'"),
        (("--model=tiny", "--rows=1"), "error: --rows: the last, 1, is less than the 2 slots of"),
        (("--model=tiny", "--groups=3"), "error: --slots: 4 cannot be split evenly into --groups"),
        (("--model=tiny", "--page=7"), "error: --max_length: 48 is no multiple of --page 7"),
        (("--model=tiny", "--length=12,48"), "error: --length: 12 is no multiple of --page 8"),
        (("--model=tiny", "--tokenizer=/nowhere"), "error: /nowhere holds no tokenizer"),
        (("--model=tiny", "--platforms=wasm"), "error: --platforms: 'wasm' is not among"),
    ],
)
def test_errors_of_the_script(arguments, message, tmp_path, export):
    assert message in export("--out", tmp_path / "b", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("slots", "longest", "rows"),
    [(8, 4096, (1, 8, *PIECES)), (256, 4096, (1, 16, 64, *PIECES)),
     (2, 48, (1, 2, 96)), (1, 1, (1,)), (300, 4096, (1, 16, 64, 300, 1024, 2048, 4096)),
     (600, 1, (1, 16, 64, 256, 600)), (3000, 4096, (1, 16, 64, 256, 3000, 6000))],
)  # fmt: skip
def test_rows_that_nobody_named(slots, longest, rows):
    assert default_rows(slots, longest) == rows
