"""Decoding with a cache is the forward pass: every token's distribution, greedy texts, meshes."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.models import decode
from spmd.models.decode import steps
from spmd.models.llama import quantize
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.serving.bundle.bundle import Bundle
from spmd.serving.bundle.memory import compile_bundle
from spmd.serving.engine.backend import Limits, Sampling, SlotPart
from spmd.serving.engine.model_backend import ModelBackend, generate
from tests.models.llama.made import LATENT, forward, fresh_params
from tests.models.llama.weights import checkpoints
from tests.models.llama.weights.checkpoints import with_random_biases

VOCABULARY = 128
PAGES = 12
"""Of a group: as many as its two slots can fill."""

SHAPE = decode.ServingShape(
    slots=4,
    max_length=48,
    rows=(4, 12),
    lengths=(16, 48),
    page=8,
    groups=2,
    top_logprobs=VOCABULARY,  # all of them: whole distributions are compared
    cache_dtype="float32",
)
FEW = SHAPE._replace(rows=SHAPE.rows[-1:], lengths=SHAPE.lengths[-1:])
MESHES = ((1, 1), (2, 4), (2, 1), (1, 8))
GREEDY = Sampling(temperature=0.0)
QUICK = ("qwen2",)
"""It has windows and biases; other parts are beside the forward pass in quantized weights."""


@pytest.fixture(autouse=True, scope="module")
def scored_in_blocks() -> Iterator[None]:
    """Log-probabilities of twelve rows are made of four at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "SCORED", 4)
        yield


def limits(shape: decode.ServingShape = SHAPE) -> Limits:
    """What `spmd.serving.language_backend` makes of a bundle's contract."""
    sizes = shape.slots, shape.max_length, shape.rows, shape.groups, shape.page
    return Limits(*sizes, PAGES, shape.top_logprobs, VOCABULARY)


def backend_of(programs: Any, shape: decode.ServingShape = SHAPE) -> ModelBackend:
    return ModelBackend(programs, limits(shape))


def plain(params: Any, config: LlamaConfig, **changes: Any) -> ModelBackend:
    shape = SHAPE._replace(**changes)
    return backend_of(Plain(params, config, shape), shape)


@functools.cache
def random_programs() -> "Plain":
    """Compiled once; what a test leaves in the pages is garbage to the next."""
    return Plain(*random_model(2), FEW)


class Plain:
    """The functions under `jax.jit`: what is compared with, and quick to compile."""

    compile_total = 0

    def __init__(
        self, params: Any, config: LlamaConfig, shape: decode.ServingShape, pages: int = PAGES
    ) -> None:
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        functions, *_ = decode.functions(LlamaRows(config), shape, types)
        self.functions = {function.name: function for function in functions}
        self._jitted = {name: jax.jit(f.fn) for name, f in self.functions.items()}
        self._params = params
        leaves = decode.state_leaves(LlamaRows(config), shape, pages)
        self.state = jax.tree.map(lambda x: jnp.full(x.shape, x.fill, x.dtype), leaves)

    def run(self, name: str, *inputs: Any) -> Any:
        own = {"weights": self._params, "state": self.state}
        roles = self.functions[name].roles
        given = iter(inputs)
        arguments = (own[r] if r in own else next(given) for r in roles)
        self.state, outputs = self._jitted[name](*arguments)
        return outputs


def on_mesh(
    params: Any, config: LlamaConfig, mesh: Any, shape: decode.ServingShape = SHAPE
) -> Bundle:
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    functions, leaves, specs, primary = decode.functions(LlamaRows(config), shape, types)
    return compile_bundle(
        functions, mesh, weights=params, specs=specs, state=leaves, primary=primary,
        options=spmd.Options(check=True), symbols={"pages": PAGES},
    )  # fmt: skip


def distribution(tokens: Any, row: int) -> np.ndarray[Any, Any]:
    """(V,) log-probabilities of one row of a report that has all of them."""
    found = np.full(VOCABULARY, np.nan, np.float32)
    found[tokens.top_ids[row]] = tokens.top_logprobs[row]
    return found


class Sequences:
    """Prompts in slots, run in steps that a test composes.

    Attributes:
      tokens: slot -> its prompt, and what was drawn behind it.
      found: slot -> position -> the distribution (V,) behind the token there.
    """

    def __init__(
        self,
        backend: ModelBackend,
        prompts: Mapping[int, Sequence[int]],
        sampling: Sampling = GREEDY,
    ) -> None:
        self.backend = backend
        self.tokens = {slot: [*prompt] for slot, prompt in prompts.items()}
        self.found: dict[int, dict[int, Any]] = {slot: {} for slot in prompts}
        self._at = dict.fromkeys(prompts, 0)
        self._prompts = {slot: len(tokens) for slot, tokens in self.tokens.items()}
        # Pages of a slot are anywhere.
        given = np.random.default_rng(0).permutation(PAGES).reshape(2, -1).tolist()
        self.pages = {slot: tuple(given[slot % 2]) for slot in prompts}
        for slot, prompt in prompts.items():
            backend.begin(slot, sampling, prompt)

    def step(self, rows: Mapping[int, int], scored: bool = True) -> Callable[[], None]:
        """Begins a step of so many rows of each slot; what is returned takes its results in."""
        parts = [self._part(slot, count, scored) for slot, count in rows.items()]
        call = self.backend.step(parts)

        def finish() -> None:
            made = call()
            drawing = [part for part in parts if part.draws]
            assert len(made.drawn.ids) == len(drawing)
            for i, part in enumerate(drawing):
                self.tokens[part.slot].append(int(made.drawn.ids[i]))
                last = part.start + len(part.tokens or (0,)) - 1
                self.found[part.slot][last] = distribution(made.drawn, i)
            for part, scores in zip(parts, made.scores, strict=True):
                if part.targets is None:
                    assert scores is None
                    continue
                assert scores is not None
                np.testing.assert_array_equal(scores.ids, part.targets)
                for i in range(len(part.targets)):
                    self.found[part.slot][part.start + i] = distribution(scores, i)

        return finish

    def _part(self, slot: int, count: int, scored: bool) -> SlotPart:
        start, prompt = self._at[slot], self._prompts[slot]
        self._at[slot] += count
        if start >= prompt:
            return SlotPart(slot, start, None, self.pages[slot], True)
        tokens = tuple(self.tokens[slot][start : start + count])
        behind = tuple([*self.tokens[slot][:prompt], 0][start + 1 : start + count + 1])
        draws = start + count == prompt
        return SlotPart(slot, start, tokens, self.pages[slot], draws, behind if scored else None)

    def decode(self, slots: Sequence[int], steps: int) -> None:
        """Two steps are always under way."""
        under_way: collections.deque[Callable[[], None]] = collections.deque()
        for _ in range(steps):
            under_way.append(self.step(dict.fromkeys(slots, 1)))
            if len(under_way) > 2:
                under_way.popleft()()
        for finish in under_way:
            finish()


def check_against_forward(backend: ModelBackend, params: Any, config: LlamaConfig) -> None:
    """Chunks of several slots beside rows that decode, over borders of pages and of lengths."""
    rows = zip((0, 1, 3), checkpoints.TOKENS_BS, (13, 7, 15), strict=False)
    prompts = {slot: row[:length].tolist() for slot, row, length in rows}
    made = Sequences(backend, prompts)
    made.step({3: 9, 0: 6})()  # both groups
    made.step({0: 7, 3: 2})()  # slot 0's prompt ends
    made.step({1: 3, 0: 1, 3: 3}, scored=False)()  # slot 0 decodes beside chunks
    made.step({3: 1, 1: 4, 0: 1})()  # prompts end beside it
    made.decode([0, 1, 3], 20)
    made.decode([0], 13)
    made.decode([3, 1], 5)
    for slot, prompt in prompts.items():
        tokens = made.tokens[slot]
        padded = np.zeros((1, SHAPE.max_length), np.int32)
        padded[0, : len(tokens) - 1] = tokens[:-1]
        wanted = np.asarray(jax.nn.log_softmax(forward(config)(params, padded)[0]))
        wanted = wanted[: len(tokens) - 1]
        places = list(made.found[slot])
        assert len(places) > len(tokens) - 6
        np.testing.assert_allclose(
            np.stack(list(made.found[slot].values())), wanted[places], rtol=0, atol=2e-4
        )
        assert tokens[len(prompt) :] == np.argmax(wanted, -1)[len(prompt) - 1 :].tolist()
    assert len(made.tokens[0]) == SHAPE.max_length + 1


@functools.cache
def random_model(key_heads: int, layers: int = 2, **changes: Any) -> tuple[Any, LlamaConfig]:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=key_heads, initializer_range=0.3,
        scan_layers=False, **changes,
    )  # fmt: skip
    return fresh_params(config), config


@pytest.mark.thorough
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=() if v in QUICK else pytest.mark.heavy) for v in checkpoints.VARIANTS],
)
def test_every_variant(variant, folders):
    """Distributions are the forward pass's, and greedy texts are transformers'."""
    config = dataclasses.replace(read_config(folders(variant)), scan_layers=False)
    params = weights.load(folders(variant), config)
    backend = plain(params, config)
    check_against_forward(backend, params, config)
    prompt = checkpoints.TOKENS_BS[0, :5].tolist()
    ours, _ = generate(backend, prompt, 32)
    assert ours == checkpoints.their_continuation(folders(variant), prompt, 32)


@pytest.mark.thorough
def test_latents_are_whole_on_each_device(devices8):
    config = dataclasses.replace(LATENT, scan_layers=False, vocab_size=VOCABULARY)
    params = fresh_params(config)
    programs = on_mesh(params, config, spmd.make_mesh(data=2, model=4, devices=devices8), FEW)
    check_against_forward(backend_of(programs, FEW), params, config)
    cache = programs.state["state/cache/3/values"]
    assert cache.addressable_shards[0].data.shape == (1, PAGES, 8, 1, 1, 16 + 4)
    made = programs.weights["weights/layers/1/self_attn/kv_b_proj/weight"]
    assert made.addressable_shards[0].data.shape == (18, 16)  # of one of four heads


@pytest.mark.thorough
def test_more_devices_than_key_heads(devices8):
    """A group on each half of the devices; there two key heads on four of them."""
    params, config = random_model(2, layers=1)
    programs = on_mesh(params, config, spmd.make_mesh(data=2, model=4, devices=devices8), FEW)
    check_against_forward(backend_of(programs, FEW), params, config)
    cache = programs.state["state/cache/0/values"]
    assert cache.addressable_shards[0].data.shape == (1, PAGES, 8, 1, 2, config.head_width)
    assert programs.state["state/drawn"].addressable_shards[0].data.shape[0] == 1
    projection = programs.weights["weights/layers/0/self_attn/q_proj/weight"]
    assert projection.addressable_shards[0].data.shape[0] == 2 * config.head_width


@pytest.mark.heavy
@pytest.mark.parametrize("key_heads", [8, 2, 1])
@pytest.mark.parametrize("shape", MESHES)
def test_meshes(shape, key_heads, devices8):
    params, config = random_model(key_heads)
    devices = devices8[: shape[0] * shape[1]]
    mesh = spmd.make_mesh(data=shape[0], model=shape[1], devices=devices)
    check_against_forward(backend_of(on_mesh(params, config, mesh)), params, config)


# Slots and pages

PROMPT = checkpoints.TOKENS_BS[0, :14].tolist()
DRAWN = Sampling(temperature=1.0, seed=7, repetition_penalty=1.2, frequency_penalty=0.5)


@functools.cache
def drawn_alone() -> list[int]:
    """Twenty tokens behind PROMPT, with nothing beside it."""
    return generate(backend_of(random_programs(), FEW), PROMPT, 20, DRAWN)[0]


@pytest.mark.thorough
def test_what_runs_beside_a_sequence_does_not_show():
    """In another slot, in other pieces, with others decoding and reading prompts beside it."""
    backend = backend_of(random_programs(), FEW)
    others = {slot: checkpoints.TOKENS_BS[slot, :12].tolist() for slot in (0, 1, 2)}
    made = Sequences(backend, {**others, 3: PROMPT}, DRAWN)
    made.step({3: 3, 0: 12})()
    made.step({2: 7, 3: 5, 0: 1, 1: 4}, scored=False)()
    made.step({3: 6, 2: 5, 0: 1, 1: 4}, scored=False)()
    made.decode([3, 0, 2], 5)
    made.step({1: 4, 3: 1})()
    made.decode([1, 3], 13)
    assert made.tokens[3] == PROMPT + drawn_alone()


def test_padding_writes_nothing():
    programs = random_programs()
    for layer in programs.state["cache"].values():
        layer["values"] = jnp.full_like(layer["values"], 0.5)
    before = jax.tree.map(np.array, programs.state)
    made = Sequences(backend_of(programs, FEW), {2: PROMPT})
    made.step({2: 5})()
    made.step({2: 9})()
    made.decode([2], 1)
    written = np.zeros((2, PAGES), np.bool_)
    written[1, list(made.pages[2][:2])] = True
    for layer, old in before["cache"].items():
        new = np.asarray(programs.state["cache"][layer]["values"])
        is_new = np.any(new != old["values"], axis=(2, 3, 4, 5))
        np.testing.assert_array_equal(is_new, written)
    for name in ("tokens", "seen", "drawn"):
        new = np.array(programs.state[name])
        new[1, 0] = before[name][1, 0]  # slot 2's
        np.testing.assert_array_equal(new, before[name])


def test_penalties_count_what_was_drawn():
    """Beside all tokens one by one; the prompt's do not count."""
    params, config = random_model(2)
    backend = backend_of(random_programs(), FEW)
    given = Sampling(temperature=0.0, frequency_penalty=0.6, presence_penalty=0.4)
    prompt = checkpoints.TOKENS_BS[0, :9].tolist()
    made, _ = generate(backend, prompt, 20, given)
    whole = np.asarray(forward(config)(params, np.asarray([[*prompt, *made]]))[0])
    for i, token in enumerate(made):
        drawn = np.bincount(made[:i], minlength=VOCABULARY)
        logits = whole[len(prompt) + i - 1] - 0.6 * drawn - 0.4 * (drawn > 0)
        assert logits[token] >= logits.max() - 1e-3
    assert made != generate(backend, prompt, 20)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(temperature: float) -> None:
    """Right and wrong ones, of two slots of a group beside one that has none."""
    backend = plain(*random_model(2), **FEW._replace(slots=24, drafts=3)._asdict())
    # Repeated tokens change what is drawn, and so do drafts that count as drawn.
    sampling = Sampling(temperature, seed=3, repetition_penalty=1.5, frequency_penalty=0.6)
    alone, logprobs = generate(backend, PROMPT, 20, sampling)
    assert len(set(alone)) > 8
    slots = {0: (0, 1, 2, 3), 5: (4, 5, 6, 7), 3: (8, 9, 10, 11)}
    rights = {0: itertools.cycle([3, 0, 1]), 5: itertools.cycle([2]), 3: itertools.repeat(None)}
    made: dict[int, list[int]] = {}
    for slot, pages in slots.items():
        backend.begin(slot, sampling, PROMPT)
        for start in range(0, len(PROMPT), 12):
            chunk = tuple(PROMPT[start : start + 12])
            draws = start + len(chunk) == len(PROMPT)
            drawn = backend.step([SlotPart(slot, start, chunk, pages, draws)])().drawn
        made[slot] = [int(drawn.ids[0])]
    while made:
        parts, counts = [], []
        for slot, tokens in made.items():
            right, at = next(rights[slot]), len(tokens)
            drafts = alone[at : at + right] if right is not None else []
            if right is not None and len(drafts) < 3:
                drafts = [*drafts, (alone[at + len(drafts)] + 1) % VOCABULARY]
            counts.append(1 + (right or 0))
            position = len(PROMPT) + at - 1
            parts.append(SlotPart(slot, position, None, slots[slot], True, drafts=tuple(drafts)))
        drawn, row = backend.step(parts)().drawn, 0
        for part, count in zip(parts, counts, strict=True):
            tokens = made[part.slot]
            found = drawn.ids[row : row + count].tolist()
            assert found == alone[len(tokens) : len(tokens) + count]
            np.testing.assert_allclose(
                drawn.logprobs[row : row + count],
                logprobs[len(tokens) : len(tokens) + count],
                atol=1e-4,
            )
            tokens += found
            row += part.rows
            if len(tokens) > 14:
                del made[part.slot]


def test_biases_and_masks_of_slots():
    """They are the slot's own, last until they are changed, and end with its sequence."""
    params, config = random_model(2)
    prompt = PROMPT[:9]
    backend = backend_of(random_programs(), FEW)
    wanted, logprobs = generate(backend, prompt, 4)
    pages = (0, 1, 2)
    mask = np.zeros(4, np.uint32)
    mask[1] = 1 << 7  # token 39
    biased = dataclasses.replace(GREEDY, logit_bias=((5, -100.0), (77, 100.0)))

    def first(slot: int, sampling: Sampling | None, masks: Any = None) -> tuple[int, float]:
        if sampling is not None:
            backend.begin(slot, sampling, prompt)
        if masks is not None:
            backend.allow(masks)
        drawn = backend.step([SlotPart(slot, 0, tuple(prompt), pages, True)])().drawn
        return int(drawn.ids[0]), float(drawn.logprobs[0])

    plain: Any = (wanted[0], pytest.approx(logprobs[0], abs=1e-5))
    assert first(3, biased)[0] == 77
    backend.begin(1, GREEDY, prompt)
    whole = jax.nn.log_softmax(np.asarray(forward(config)(params, np.asarray([prompt]))[0, -1]))
    # Beside a mask, the log-probability is the model's own.
    found: Any = first(3, None, {3: mask, 0: None})
    assert found == (39, pytest.approx(float(whole[39]), abs=1e-4))
    found = first(1, None)
    assert found == plain
    assert first(3, None)[0] == 39
    assert first(3, None, {3: None})[0] == 77
    assert first(3, GREEDY, {3: mask})[0] == 39
    found = first(3, GREEDY)
    assert found == plain


def test_pages_that_held_nan_serve_others():
    """A prompt for which the model breaks down breaks nobody else's."""
    programs = random_programs()
    backend = backend_of(programs, FEW)
    wanted = generate(backend, PROMPT, 12)
    for layer in programs.state["cache"].values():
        layer["values"] = jnp.full_like(layer["values"], jnp.nan)
    assert generate(backend, PROMPT, 12) == wanted


# Quantization


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "most", "changes"),
    [
        pytest.param("int8", 0.05, {}, marks=pytest.mark.heavy),
        ("int8", 0.05, {"attention_bias": "qkvo", "qk_norm": True, "sliding_window": 5}),
        ("fp8", 0.2, {"num_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 2.0}),
        ("int4", 0.8, {}),
    ],
)
def test_quantized_weights(kind, most, changes):
    """What is computed is the model of the rounded weights; they are near the true ones."""
    params, config = random_model(2, layers=1, **changes)
    params = with_random_biases(params)
    packed = quantize.quantize(params, kind)
    rounded = jax.tree.map(
        lambda leaf: _dequantized(leaf) if _is_quantized(leaf) else leaf,
        packed,
        is_leaf=_is_quantized,
    )
    tokens = checkpoints.TOKENS_BS[:1, :12]
    wanted = jax.nn.log_softmax(forward(config)(rounded, tokens)[0])
    found = all_distributions(plain(packed, config, **FEW._asdict()), tokens[0].tolist())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-4)
    true = jax.nn.log_softmax(forward(config)(params, tokens)[0])
    error = np.sqrt(np.mean(np.square(found - true))) / np.std(true)
    assert 1e-4 < error < most


def all_distributions(backend: ModelBackend, prompt: list[int]) -> Any:
    """Behind each token of a prompt, which is run in two pieces."""
    made = Sequences(backend, {1: prompt})
    made.step({1: 7})()
    made.step({1: len(prompt) - 7})()
    return np.stack([made.found[1][i] for i in range(len(prompt))])


def _dequantized(leaf: Any) -> Any:
    bias = {k: x for k, x in leaf.items() if k == "bias"}
    if leaf["values"].dtype == np.uint8 or leaf["values"].ndim == 2:
        return {"weight": quantize.dequantize(leaf)} | bias
    return {
        "weight": leaf["values"].astype(np.float32) * leaf["scales"][..., None]
    } | bias  # experts


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, dict) and "values" in leaf


def test_types_of_quantized_weights():
    params, config = random_model(2)
    for kind in quantize.QUANTIZATIONS:
        packed = quantize.quantize(params, kind)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), packed) == jax.tree.map(
            lambda x: (x.shape, x.dtype), quantize.quantized_types(config, kind)
        )


def test_int8_cache():
    params, config = random_model(2)
    exact = backend_of(random_programs(), FEW)
    small = plain(params, config, **{**FEW._asdict(), "cache_dtype": "int8"})
    prompt = checkpoints.TOKENS_BS[0, :12].tolist()
    found = [all_distributions(backend, prompt) for backend in (exact, small)]
    error = np.sqrt(np.mean(np.square(found[1] - found[0]))) / np.std(found[0])
    assert 1e-5 < error < 0.03
