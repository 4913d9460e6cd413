"""Quantized checkpoints, written after their formats' specifications, stand for the same numbers.

Numbers are drawn before they are stored, so a matrix is known without reading a file.
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import spmd
from spmd.models.llama import decode
from spmd.models.llama.config import ConfigError, LlamaConfig
from spmd.models.llama.quantize import dequantize
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.files import TensorEntry, WeightsError, plan_files, write_files
from spmd.models.llama.weights.sources import hf_source
from spmd.serving.bundle.read import load_bundle
from spmd.serving.llama_bundle import serving_weights, write_llama_bundle
from tests.models.llama.made import fresh_params
from tests.models.llama.test_decode import FEW, PAGES, all_distributions, backend_of, plain
from tests.models.llama.weights import checkpoints

Array = np.ndarray[Any, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def in_words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Numbers (N, M) -> int32 (N, M / n): the i-th of n is number `order[i]` of its neighbours."""
    count = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // count), np.uint32)
    for i, place in enumerate(order or range(count)):
        words |= numbers[:, place::count].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def integers(form: str, bits: int, group: int, sym: bool, mixed: bool, weight: Array) -> Any:
    """The tensors of a matrix in a format of integers with groups, and the matrix."""
    rng, (outputs, inputs) = np.random.default_rng(weight.size), weight.shape
    groups_I = np.arange(inputs) // (inputs if group == -1 else group)
    if mixed:
        rng.shuffle(groups_I)
    shape, half = (outputs, groups_I.max() + 1), 2 ** (bits - 1)
    zeros = np.full(shape, half) if sym else rng.integers(1, 2 * half, shape)
    scales = (rng.uniform(0.5, 1.5, shape) * np.abs(weight).max() / half).astype(np.float16)
    wide, shift = scales.astype(np.float32)[:, groups_I], zeros[:, groups_I]
    numbers = np.clip(np.rint(weight / wide) + shift, 0, 2 * half - 1).astype(int)
    index = {"g_idx": groups_I.astype(np.int32)}
    if form == "awq":
        made = {"qweight": in_words(numbers.T, 4, AWQ_ORDER), "scales": scales.T}
        made["qzeros"] = in_words(zeros.T, 4, AWQ_ORDER)
    elif form == "packed":
        made = {"weight_packed": in_words(numbers, bits), "weight_scale": scales}
        made |= {"weight_shape": np.array(weight.shape)} | {f"weight_{k}": index[k] for k in index}
        made |= {} if sym else {"weight_zero_point": in_words(zeros.T, bits).T}
    else:
        made = {"qweight": in_words(numbers, bits).T, "scales": scales.T, **index}
        made["qzeros"] = in_words((zeros - (form == "gptq")).T, bits)
        made["bias"] = np.zeros(outputs, np.float16)  # old files have them, though no model has
    return made, (numbers - shift).astype(np.float32) * wide


def of_bytes(dtype: str, block: Sequence[int], scale: str, weight: Array) -> Any:
    """The tensors of a matrix of 8-bit numbers, and the matrix; a block of 0 is the whole dim."""
    block = tuple(wide or size for wide, size in zip(block, weight.shape, strict=True))
    shape = [-(-size // wide) for wide, size in zip(block, weight.shape, strict=True)]
    most, rng = 127 if dtype == "int8" else 448, np.random.default_rng(1)
    scales = (rng.uniform(1, 2, shape) * np.abs(weight).max() / most).astype(ml_dtypes.bfloat16)
    wide = np.kron(scales.astype("f4"), np.ones(block, "f4"))[tuple(map(slice, weight.shape))]
    numbers = (np.rint(weight / wide) if dtype == "int8" else weight / wide).astype(dtype)
    stored = scales[0] if shape == [1, 1] else scales
    made = {"weight": numbers, scale: stored, "input_scale": np.ones(1, np.float32)}
    return made, numbers.astype("f4") * wide


def compressed(form: str, **scheme: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


FORMATS: dict[str, tuple[Callable[[Array], Any], Mapping[str, Any]]] = {}
for version, (bits, group), sym, mixed in itertools.product(
    ("gptq", "gptq_v2", "packed"), ((4, 32), (4, 64), (4, 128), (4, -1), (8, 64)), (1, 0), (1, 0)
):
    about: dict[str, Any] = {"bits": bits, "group_size": group, "sym": bool(sym)}
    about |= {"quant_method": "gptq", "checkpoint_format": version, "desc_act": bool(mixed)}
    if version == "packed":
        scheme = {"num_bits": bits, "symmetric": bool(sym), "actorder": "group" if mixed else None}
        about = compressed("pack-quantized", type="int", **scheme)
    make = functools.partial(integers, version, bits, group, bool(sym), bool(mixed))
    FORMATS[f"{version} {bits} {group} {sym} {mixed}"] = make, about
for group in (32, 64, 128):
    about = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group}
    FORMATS[f"awq {group}"] = functools.partial(integers, "awq", 4, group, False, False), about
for dtype, block in (("float8_e4m3fn", (0, 0)), ("float8_e4m3fn", (1, 0)), ("int8", (1, 0))):
    kind = compressed("float-quantized", type="float" if dtype != "int8" else "int", num_bits=8)
    FORMATS[f"{dtype} {block}"] = functools.partial(of_bytes, dtype, block, "weight_scale"), kind
for block in ((128, 128), (48, 80)):
    make = functools.partial(of_bytes, "float8_e4m3fn", block)
    kind = compressed("float-quantized", type="float", num_bits=8, block_structure=block)
    FORMATS[f"blocks {block}"] = functools.partial(make, "weight_scale"), kind
    about = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}
    FORMATS[f"fp8 {block}"] = functools.partial(make, "weight_scale_inv"), about


def rewrite(folder: Any, name: str, into: Any, changes: Any = "") -> dict[str, Array]:
    """Write a folder's projections in a format; returns all tensors as they then are.

    `changes` are more of the `quantization_config`, or what all modules lack.
    """
    stored = checkpoints.tensors(folder)
    whole, lacking = dict(stored), changes if isinstance(changes, str) else ""
    for tensor in [name for name in stored if name.endswith("_proj.weight")]:
        parts, whole[tensor] = FORMATS[name][0](stored.pop(tensor))
        module = tensor.removesuffix("weight")
        stored |= {module + part: x for part, x in parts.items() if part != lacking}
    config = json.loads((folder / "config.json").read_text())
    given = {"quantization_config": {**FORMATS[name][1], **({} if lacking else dict(changes))}}
    for path, tensors, more in ((into / "whole", whole, {}), (into / "quantized", stored, given)):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | more))
        (path / "tokenizer.json").write_text("{}")
        entries = [TensorEntry(name, x.shape, x.dtype.name) for name, x in tensors.items()]
        write_files(path, plan_files(entries, 10**9), iter(tensors.values()))
    return whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.1, scan_layers=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "plain"
    weights.save(fresh_params(config), config, path)
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_that_are_stored(name: str, folder: Any, tmp_path: Any) -> None:
    """Bit by bit: for training, for converting and for serving, where products are of the same."""
    whole, into = rewrite(folder, name, tmp_path), tmp_path / "quantized"
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    with hf_source(into) as source:
        same(*(weights.load(tmp_path / x, source.config) for x in ("whole", "quantized")))
        same({name: np.asarray(tensor) for name, tensor in source.tensors.items()}, whole)
        tree = jax.tree.map(np.asarray, serving_weights(source, "float32", "none"))
    assert "weight" in tree["lm_head"] and "weight" not in tree["layers"]["0"]["mlp"]["up_proj"]
    down, want = tree["layers"]["0"]["mlp"]["down_proj"], "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(dequantize(down), whole[want])
    x = np.random.default_rng(0).standard_normal((3, 384)).astype(np.float32)
    np.testing.assert_allclose(decode._linears(x, [down])[0], x @ whole[want].T, atol=1e-3)


WIDE = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1, "head_dim": 32}
LATENT = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "kv_lora_rank": 32}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "name", "devices", "changes"),
    [
        ("grouped", "gptq 4 32 0 1", (1, 2), {"num_hidden_layers": 1}),
        ("qwen3", "awq 32", (2, 2), {"num_hidden_layers": 1}),
        ("grouped", "packed 4 64 0 1", (), {}),
        ("qwen3", "fp8 (48, 80)", (), {}),
        ("biased", "int8 (1, 0)", (), {}),
        ("deepseek_v2", "gptq 4 32 1 1", (), LATENT | {"moe_intermediate_size": 64}),
    ],
)
def test_log_probabilities_are_transformers(variant, name, devices, changes, tmp_path, devices8):
    """Of the model of the numbers that are stored; groups of a row are on several devices."""
    pytest.importorskip("transformers")
    wide = {k: v for k, v in WIDE.items() if k != "head_dim" or variant != "deepseek_v2"}
    checkpoints.write(variant, tmp_path / "plain", **wide, **changes)
    rewrite(tmp_path / "plain", name, tmp_path)
    with hf_source(tmp_path / "quantized") as source:
        tree = jax.tree.map(np.asarray, serving_weights(source, "float32", "none"))
        if devices:
            out = tmp_path / "bundle"
            write_llama_bundle(source, out, FEW, dtype="float32", platforms=("cpu",))
    backend = plain(jax.tree.map(jnp.asarray, tree), source.config, **FEW._asdict())
    if devices:
        devices8 = devices8[: devices[0] * devices[1]]
        mesh = spmd.make_mesh(data=devices[0], model=devices[1], devices=devices8)
        bundle = load_bundle(tmp_path / "bundle", mesh, symbols={"pages": PAGES})
        for part in ("values", "scales", "zeros"):
            held = bundle.weights[f"weights/layers/0/mlp/down_proj/{part}"]
            assert held.addressable_shards[0].data.shape[1] == held.shape[1] // devices[1]
        backend = backend_of(bundle, FEW)
    wanted = jax.nn.log_softmax(checkpoints.their_logits(tmp_path / "whole")[0, :12])
    found = all_distributions(backend, checkpoints.TOKENS_BS[0, :12].tolist())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * float(np.std(wanted)))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq 32", {"quant_method": "bitsandbytes"}, 'quant_method "bitsandbytes" are not read'),
        ("awq 32", {"version": "gemv"}, 'awq cannot be read with version "gemv" ("gemm" can'),
        ("gptq 4 32 1 0", {"bits": 3}, "gptq cannot be read with bits 3 (4, 8 can be read)"),
        ("gptq 4 32 1 0", {"hyperbits": 3}, "hyperbits, which is unknown: remove it if"),
        ("gptq 4 32 0 0", {"sym": True}, "has zeros of its own, but quantization_config says sym"),
        ("gptq 4 32 1 0", "qzeros", "down_proj is quantized, and has no qzeros; download"),
        ("gptq 4 32 1 1", {"group_size": 96}, "do not fit scales (256, 12)"),
        ("gptq 4 32 1 1", "g_idx", "has no g_idx"),
        ("int8 (1, 0)", compressed("pack-quantized", num_bits=4, type="float"), "4 bits of"),
    ],
)
def test_what_cannot_be_read_is_named(name, changes, message, folder, tmp_path):
    rewrite(folder, name, tmp_path, changes)
    with (
        pytest.raises((ConfigError, WeightsError)) as found,
        hf_source(tmp_path / "quantized") as x,
    ):
        np.asarray(x.tensors["model.layers.0.self_attn.q_proj.weight"])
    assert message in str(found.value)
