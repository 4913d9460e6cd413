"""Decoding with a cache is the forward pass: every token's distribution, greedy texts, meshes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from models.llama import decode, model, quantize
from models.llama.config import LlamaConfig
from models.llama.weights import load as weights
from models.llama.weights.config import read_config
from serving.bundle.bundle import Bundle
from serving.bundle.memory import compile_bundle
from serving.engine.backend import Limits, Sampling
from serving.engine.model_backend import ModelBackend, generate
from tests.models.llama.inverse import dequantize
from tests.models.llama.weights import checkpoints

VOCABULARY = 128
SHAPE = decode.ServingShape(
    slots=4,
    max_length=48,
    chunks=(8,),
    lengths=(16, 48),
    decode_steps=6,
    top_logprobs=VOCABULARY,  # all of them: whole distributions are compared
    cache_dtype="float32",
)
FULL = SHAPE._replace(chunks=(4, 8), lengths=(16, 32, 48))
LIMITS = Limits(4, 48, SHAPE.chunks, SHAPE.decode_steps, VOCABULARY, VOCABULARY)
FULL_LIMITS = dataclasses.replace(LIMITS, chunks=FULL.chunks)
MESHES = ((1, 1), (2, 4), (1, 8))


@functools.cache
def random_programs(key_heads: int) -> Plain:
    """Compiled once; what a test leaves in the slots is garbage to the next."""
    return Plain(*random_model(key_heads), SHAPE)


class Plain:
    """The functions under `jax.jit`: what is compared with, and quick to compile."""

    compile_total = 0

    def __init__(self, params: Any, config: LlamaConfig, shape: decode.ServingShape) -> None:
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        functions, leaves, _, _ = decode.functions(config, shape, types)
        self.functions = {function.name: function for function in functions}
        self._jitted = {name: jax.jit(f.fn) for name, f in self.functions.items()}
        self._params = params
        self.state = jax.tree.map(lambda x: jnp.full(x.shape, x.fill, x.dtype), leaves)

    def run(self, name: str, *inputs: Any) -> Any:
        own = {"weights": self._params, "state": self.state}
        roles = self.functions[name].roles
        given = iter(inputs)
        arguments = (own[r] if r in own else next(given) for r in roles)
        self.state, outputs = self._jitted[name](*arguments)
        return outputs


def on_mesh(
    params: Any, config: LlamaConfig, mesh: Any, shape: decode.ServingShape = FULL, **given: Any
) -> Bundle:
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    functions, leaves, specs, primary = decode.functions(config, shape, types)
    used = [f for f in functions if f.tags["kind"] in ("decode", "score")]
    return compile_bundle(
        used, mesh, weights=params, specs=specs, state=leaves, primary=primary,
        options=spmd.Options(check=True), **given,
    )  # fmt: skip


def distribution(tokens: Any, row: Any) -> np.ndarray[Any, Any]:
    """(V,) log-probabilities of one row of a report that has all of them."""
    found = np.full(VOCABULARY, np.nan, np.float32)
    found[tokens.top_ids[row]] = tokens.top_logprobs[row]
    return found


def follow(backend: ModelBackend, slot: int, prompt: list[int], chunks: list[int]) -> list[Any]:
    """Read a prompt in given pieces: the distribution behind each of its tokens."""
    found, start = [], 0
    for size in chunks:
        is_last = start + size == len(prompt)
        targets = (
            [*prompt[start + 1 : start + size], 0]
            if is_last
            else prompt[start + 1 : start + size + 1]
        )
        sampling = Sampling(temperature=0.0) if is_last else None
        tokens = prompt[: start + size]
        made = backend.prefill(slot, tokens, start, sampling=sampling, targets=targets)()
        assert made.scores is not None
        np.testing.assert_array_equal(made.scores.ids, targets)
        found += [distribution(made.scores, i) for i in range(size)]
        start += size
    assert start == len(prompt)
    return found


def check_against_forward(backend: ModelBackend, params: Any, config: LlamaConfig) -> None:
    """Two slots at a time, over every border of chunks and of lengths, token by token."""
    forward = jax.jit(functools.partial(model.forward, config=config))
    prompts = {1: checkpoints.TOKENS_BS[0, :13].tolist(), 3: checkpoints.TOKENS_BS[1, :7].tolist()}
    chunks = {1: [8, 4, 1], 3: [7]}
    found = {slot: follow(backend, slot, prompts[slot], chunks[slot]) for slot in prompts}
    sequences = {s: [*p, int(np.argmax(found[s][-1]))] for s, p in prompts.items()}
    active = [slot in prompts for slot in range(SHAPE.slots)]
    for steps in (6, 1, 6, 6, 6, 6, 3):
        made = backend.decode(active, steps)()
        for slot, sequence in sequences.items():
            found[slot] += [distribution(made, (i, slot)) for i in range(steps)]
            sequence += made.ids[:, slot].tolist()
    assert len(sequences[1]) == SHAPE.max_length
    for slot, sequence in sequences.items():
        logits = forward(params, np.asarray([sequence[:-1]], np.int32))[0]
        wanted = jax.nn.log_softmax(logits)
        np.testing.assert_allclose(np.stack(found[slot]), wanted, rtol=0, atol=2e-4)
        np.testing.assert_array_equal(
            sequence[len(prompts[slot]) :], np.argmax(wanted, -1)[len(prompts[slot]) - 1 :]
        )


@functools.cache
def random_model(key_heads: int, **changes: Any) -> tuple[Any, LlamaConfig]:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=key_heads, initializer_range=0.3,
        scan_layers=False, **changes,
    )  # fmt: skip
    return model.init(jax.random.key(0), config), config


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=() if v == "heads" else pytest.mark.heavy)
        for v in checkpoints.VARIANTS
    ],
)
def test_every_variant(variant, folders):
    """Distributions are the forward pass's, and greedy texts are transformers'."""
    config = dataclasses.replace(read_config(folders(variant)), scan_layers=False)
    params = weights.load(folders(variant), config)
    backend = ModelBackend(Plain(params, config, SHAPE), LIMITS)
    check_against_forward(backend, params, config)
    prompt = checkpoints.TOKENS_BS[0, :5].tolist()
    ours, _ = generate(backend, prompt, 32)
    assert ours == checkpoints.their_continuation(folders(variant), prompt, 32)


def test_more_devices_than_key_heads(devices8):
    """Two key heads on eight devices: split in two, and the query heads of each in four."""
    params, config = random_model(2)
    mesh = spmd.make_mesh(data=1, model=8, devices=devices8)
    programs = on_mesh(params, config, mesh, SHAPE._replace(lengths=SHAPE.lengths[-1:]))
    check_against_forward(ModelBackend(programs, LIMITS), params, config)
    cache = programs.state["state/cache/0/values"]
    assert cache.addressable_shards[0].data.shape[2] == 1  # one key head of the two
    projection = programs.weights["weights/layers/0/self_attn/q_proj/weight"]
    assert projection.addressable_shards[0].data.shape[0] == config.head_width


@pytest.mark.heavy
def test_slots_that_are_counted_when_it_is_loaded(devices8):
    """Every op of serving over a symbolic dim: loops, caches, attention, sampling."""
    params, config = random_model(2)
    (slots,) = jax.export.symbolic_shape("slots", constraints=["mod(slots, 2) == 0"])
    mesh = spmd.make_mesh(data=2, model=4, devices=devices8)
    symbolic = SHAPE._replace(slots=slots)  # type: ignore[arg-type]  # a symbol
    programs = on_mesh(params, config, mesh, symbolic, symbols={"slots": SHAPE.slots})
    check_against_forward(ModelBackend(programs, LIMITS), params, config)


@pytest.mark.heavy
@pytest.mark.parametrize("key_heads", [8, 2, 1])
@pytest.mark.parametrize("shape", MESHES)
def test_meshes(shape, key_heads, devices8):
    params, config = random_model(key_heads)
    devices = devices8[: shape[0] * shape[1]]
    mesh = spmd.make_mesh(data=shape[0], model=shape[1], devices=devices)
    check_against_forward(ModelBackend(on_mesh(params, config, mesh), FULL_LIMITS), params, config)


@pytest.mark.heavy
@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
@pytest.mark.parametrize("shape", MESHES[1:])
def test_variants_on_meshes(shape, variant, folders, devices8):
    config = dataclasses.replace(read_config(folders(variant)), scan_layers=False)
    params = weights.load(folders(variant), config)
    mesh = spmd.make_mesh(data=shape[0], model=shape[1], devices=devices8)
    check_against_forward(ModelBackend(on_mesh(params, config, mesh), FULL_LIMITS), params, config)


# The cache


def test_slots_do_not_see_each_other():
    """A text is the same with other slots busy, idle, or in the midst of a prompt."""
    alone = ModelBackend(random_programs(2), LIMITS)
    prompt = checkpoints.TOKENS_BS[0, :9].tolist()
    wanted, _ = generate(alone, prompt, 20)
    busy = ModelBackend(random_programs(2), LIMITS)
    greedy = Sampling(temperature=0.0)
    busy.prefill(1, checkpoints.TOKENS_BS[1, :8].tolist(), 0, sampling=greedy)
    busy.prefill(2, checkpoints.TOKENS_BS[2, :8].tolist(), 0)
    busy.prefill(0, prompt[:8], 0)
    first = busy.prefill(0, prompt, 8, sampling=greedy)().first
    assert first is not None
    made = [int(first.ids[0])]
    made += busy.decode([True, True, False, False], 6)().ids[:, 0].tolist()
    busy.prefill(2, checkpoints.TOKENS_BS[2, :16].tolist(), 8, sampling=greedy)
    made += busy.decode([True, False, True, False], 6)().ids[:, 0].tolist()
    made += busy.decode([True, True, True, False], 6)().ids[:, 0].tolist()
    assert made == wanted[:19]


def test_a_copied_prefix_is_as_good_as_one_read():
    backend = ModelBackend(random_programs(2), LIMITS)
    greedy = Sampling(temperature=0.0, repetition_penalty=1.3)
    prompt = checkpoints.TOKENS_BS[0, :14].tolist()
    wanted, _ = generate(backend, prompt, 12, greedy)
    backend.copy(0, 2, 10)
    first = backend.prefill(2, prompt, 10, sampling=greedy)().first
    assert first is not None
    made = [int(first.ids[0])]
    made += backend.decode([False, False, True, False], 6)().ids[:, 2].tolist()
    made += backend.decode([False, False, True, False], 5)().ids[:, 2].tolist()
    assert made == wanted


def test_a_prompt_that_ends_at_the_slots_end():
    """The last chunk's bucket would not fit behind it: tokens before are done again."""
    params, config = random_model(2)
    backend = ModelBackend(random_programs(2), LIMITS)
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, 48).tolist()
    found = follow(backend, 0, tokens, [8, 8, 8, 8, 8, 3, 5])
    logits = jax.jit(functools.partial(model.forward, config=config))(params, np.asarray([tokens]))
    np.testing.assert_allclose(np.stack(found), jax.nn.log_softmax(logits[0]), rtol=0, atol=2e-4)


def test_penalties_count_what_was_drawn():
    """Beside all tokens one by one; the prompt's do not count."""
    params, config = random_model(2)
    backend = ModelBackend(random_programs(2), LIMITS)
    given = Sampling(temperature=0.0, frequency_penalty=0.6, presence_penalty=0.4)
    prompt = checkpoints.TOKENS_BS[0, :9].tolist()
    made, _ = generate(backend, prompt, 20, given)
    forward = jax.jit(functools.partial(model.forward, config=config))
    whole = np.asarray(forward(params, np.asarray([[*prompt, *made]]))[0])
    for i, token in enumerate(made):
        drawn = np.bincount(made[:i], minlength=VOCABULARY)
        logits = whole[len(prompt) + i - 1] - 0.6 * drawn - 0.4 * (drawn > 0)
        assert logits[token] >= logits.max() - 1e-3
    assert made != generate(backend, prompt, 20)[0]


def test_a_slot_that_held_nan_serves_others():
    """A prompt for which the model breaks down breaks nobody else's."""
    programs = random_programs(2)
    backend = ModelBackend(programs, LIMITS)
    prompt = checkpoints.TOKENS_BS[0, :9].tolist()
    wanted = generate(backend, prompt, 12)
    for layer in programs.state["cache"].values():
        layer["values"] = jnp.full_like(layer["values"], jnp.nan)
    assert generate(backend, prompt, 12) == wanted


def test_misuse_is_said():
    backend = ModelBackend(random_programs(2), LIMITS)
    with pytest.raises(ValueError, match="1 to 8 tokens within 48"):
        backend.prefill(0, list(range(9)), 0)
    with pytest.raises(ValueError, match="slot 0 holds 0 tokens, not 4"):
        backend.prefill(0, [1] * 5, 4)
    with pytest.raises(ValueError, match="at most 6 tokens"):
        backend.decode([True, False, False, False], 7)


# Quantization


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.05), ("fp8", 0.2), ("int4", 0.8)])
def test_quantized_weights(kind, most):
    """What is computed is the model of the rounded weights; they are near the true ones."""
    params, config = random_model(2)
    packed = quantize.quantize(params, kind)
    rounded = jax.tree.map(
        lambda leaf: {"weight": dequantize(leaf)} if _is_quantized(leaf) else leaf,
        packed,
        is_leaf=_is_quantized,
    )
    forward = jax.jit(functools.partial(model.forward, config=config))
    tokens = checkpoints.TOKENS_BS[:1, :12]
    wanted = jax.nn.log_softmax(forward(rounded, tokens)[0])
    backend = ModelBackend(Plain(packed, config, SHAPE), LIMITS)
    found = np.stack(follow(backend, 0, tokens[0].tolist(), [8, 4]))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-4)
    true = jax.nn.log_softmax(forward(params, tokens)[0])
    error = np.sqrt(np.mean(np.square(found - true))) / np.std(true)
    assert 1e-4 < error < most


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, dict) and "values" in leaf


def test_types_of_quantized_weights():
    params, config = random_model(2)
    for kind in quantize.QUANTIZATIONS:
        packed = quantize.quantize(params, kind)
        types = quantize.quantized_types(config, kind)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), packed) == jax.tree.map(
            lambda x: (x.shape, x.dtype), types
        )


def test_int8_cache():
    params, config = random_model(2)
    exact = ModelBackend(random_programs(2), LIMITS)
    small = ModelBackend(Plain(params, config, SHAPE._replace(cache_dtype="int8")), LIMITS)
    prompt = checkpoints.TOKENS_BS[0, :12].tolist()
    found = [np.stack(follow(backend, 0, prompt, [8, 4])) for backend in (exact, small)]
    error = np.sqrt(np.mean(np.square(found[1] - found[0]))) / np.std(found[0])
    assert 1e-5 < error < 0.03
