"""Adapters that PEFT wrote, served beside one base: PEFT's numbers, and each has its own text."""

import asyncio
import dataclasses
import itertools
import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

import spmd
from spmd.models.decode import ServingShape
from spmd.models.llama.lora import merged_source
from spmd.models.llama.weights.sources import hf_source
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.read import load_bundle
from spmd.serving.engine.actions import GREEDY
from spmd.serving.engine.backend import SlotPart
from spmd.serving.engine.model_backend import ModelBackend
from spmd.serving.http.limits import ServerOptions
from spmd.serving.language_backend import model_backend, put_adapter
from spmd.serving.llama_bundle import write_llama_bundle
from spmd.serving.load import load_model
from tests.models.llama.weights import checkpoints
from tests.serving.http.live import Live, post, serving, wired
from tests.serving.test_several_processes import Pair
from tests.waiting import PATIENCE, wait_until

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

V = 288
SHAPE = ServingShape(8, 64, (8, 32), (64,), 8, 2, V, "float32", adapters=3, adapter_rank=8)
TRAINED: dict[str, dict[str, Any]] = {
    "low": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "all": {
        "r": 3, "lora_alpha": 4, "target_modules": "all-linear", "use_rslora": True,
        "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.\w+": 5},
        "alpha_pattern": {"model.layers.0.self_attn.o_proj": 9, "down_proj": 2},
    },
    "mlp": {"r": 4, "lora_alpha": 4, "target_modules": r".*\.mlp\.(up|down)_proj"},
    "last": {"r": 8, "target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
}  # fmt: skip
PROMPTS = ["Once upon a time", "def main(", "a", "The mesh of"]


class Made(NamedTuple):
    model: Path
    adapters: Path
    bundle: Path

    def theirs(self, name: str | None) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.model)
        return peft.PeftModel.from_pretrained(model, self.adapters / name) if name else model


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Made:
    import torch

    warnings.simplefilter("ignore", FutureWarning)  # those of peft; pytest sets them back
    folder: Path = tmp_path_factory.mktemp("adapters")
    found = Made(folder / "model", folder / "peft", folder / "base")
    checkpoints.write("grouped", found.model, vocab_size=V)
    for number, (name, config) in enumerate(TRAINED.items()):
        torch.manual_seed(number)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        peft.get_peft_model(found.theirs(None), lora).save_pretrained(found.adapters / name)
    with hf_source(found.model) as source:
        source = dataclasses.replace(source, tokenizer_from=None)  # texts are bytes
        told: dict[str, Any] = {"dtype": "float32", "name": "base", "platforms": ["cpu"]}
        write_llama_bundle(source, found.bundle, SHAPE, **told)
    return found


def run_all(backend: ModelBackend, places: list[int]) -> tuple[list[list[int]], Any]:
    """A step of a prompt in each slot, with these adapters; log-probabilities (slots, V) behind."""
    rng, parts, prompts = np.random.default_rng(0), list[SlotPart](), list[list[int]]()
    for slot, place in enumerate(places):
        prompts.append(rng.integers(0, V, 3 + slot % 4).tolist())
        backend.begin(slot, GREEDY, prompts[-1])
        pages = tuple(range(slot % 4 * 8, slot % 4 * 8 + 8))
        parts.append(SlotPart(slot, 0, tuple(prompts[-1]), pages, True, adapter=place))
    drawn = backend.step(parts)().drawn
    order = np.argsort(drawn.top_ids, axis=-1)
    return prompts, np.take_along_axis(drawn.top_logprobs, order, -1)


def test_ranks_mixed_in_one_batch_on_a_mesh_are_pefts(made: Made, devices8: Any) -> None:
    import torch

    mesh = spmd.make_mesh(data=2, model=2, devices=devices8[:4])
    bundle = load_bundle(made.bundle, mesh, functions=("begin", "adapt", "step_r32_t64"))
    for path in ("self_attn/q_proj/lora_B", "mlp/down_proj/lora_A"):
        stack = bundle.state[f"state/adapters/layers/0/{path}"]
        assert stack.addressable_shards[0].data.shape[2] == stack.shape[2] / 2
    backend, names = model_backend(bundle), ["low", "all", "mlp"]
    _, plain = run_all(backend, [-1] * 8)
    compiled = backend.compile_total
    for place, name in enumerate(names):
        put_adapter(bundle, place, str(made.adapters / name))
    prompts, found = run_all(backend, places := [-1, 0, 1, 2, 1, -1, 2, 0])

    def check(slot: int, name: str | None, found: Any) -> None:
        with torch.no_grad():
            logits = made.theirs(name)(torch.tensor([prompts[slot]])).logits[0, -1]
        wanted = torch.log_softmax(logits, -1).numpy()
        np.testing.assert_allclose(found[slot], wanted, rtol=0, atol=2e-4)

    for slot, place in enumerate(places):
        check(slot, None if place < 0 else names[place], found)
        assert np.array_equal(found[slot], plain[slot]) == (place < 0)  # the base's, bit for bit
    put_adapter(bundle, 1, str(made.adapters / "last"))
    check(2, "last", run_all(backend, places)[1])  # nothing of "all" is left
    assert backend.compile_total == compiled


@pytest.fixture(scope="module")
def live(made: Made, devices8: Any) -> Iterator[Live]:
    """A server whose model is at the other end of a line, with one adapter from the start."""
    mesh = spmd.make_mesh(data=1, devices=devices8[:1])
    bundle = load_bundle(made.bundle, mesh, symbols={"pages": 20})
    with pytest.raises(BundleError, match="other names than base; there is room for 3, as"):
        load_model(bundle, made.bundle, adapters={"base": "x"})
    loaded = load_model(bundle, made.bundle, adapters={"low": str(made.adapters / "low")})
    options = ServerOptions(adapters_from=str(made.adapters), max_waiting=1000)
    assert loaded.backend is not None
    with (
        wired(loaded.backend, None, loaded.adapt) as core,
        serving(options=options, load=False) as running,
    ):
        apart = dataclasses.replace(loaded, backend=None, core=core, adapt=core.adapt)
        running.service.become_ready(apart)
        yield running
        running.wait_idle()


def change(live: Live, what: str, name: str, path: str | None = None) -> httpx.Response:
    return post(f"{live.url}/v1/{what}_lora_adapter", json={"lora_name": name, "lora_path": path})


def body_of(model: str, prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}


def text(live: Live, model: str, prompt: str, **more: Any) -> tuple[str, int]:
    """What a prompt is completed with, and how much of it pages held."""
    answer = post(f"{live.url}/v1/completions", json=body_of(model, prompt, **more)).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


def test_they_are_models_to_openais_client(live: Live) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", timeout=PATIENCE)
    assert change(live, "load", "sql", "all").text.startswith("Success: LoRA adapter 'sql' added")
    parents = {one.id: getattr(one, "parent", None) for one in client.models.list()}
    assert parents == {"base": None, "low": "base", "sql": "base"}
    assert client.models.retrieve("sql").id == "sql"
    assert client.completions.create(model="sql", prompt="a", max_tokens=4).model == "sql"
    assert change(live, "unload", "sql").status_code == 200
    with pytest.raises(
        openai.NotFoundError, match="there is no 'sql' here; this server has 'base'"
    ):
        client.completions.create(model="sql", prompt="a")


def test_pages_are_never_anothers(live: Live) -> None:
    long = "a prompt of several pages of the pool"
    base, low = text(live, "base", long)[0], text(live, "low", long)
    assert low[0] != base and low[1] == 0
    assert text(live, "base", long) == (base, 32) and text(live, "low", long) == (low[0], 32)
    assert text(live, "base", long, cache_salt="1 ") == (base, 0)  # as that of an adapter begins
    assert text(live, "low", long, cache_salt="x") == low


def test_they_come_and_go_while_a_hundred_streams_run(live: Live) -> None:
    """Places for two, which three take in turn: each stream has its own text, whole, or a 404."""
    names, seen, over = ["all", "mlp", "last"], Counter[str](), asyncio.Event()
    expected = dict[tuple[str, str], str]()
    for name in ("base", "low", *names):
        assert (change(live, "load", name, name).status_code == 200) == (name in names)
        expected |= {(name, prompt): text(live, name, prompt)[0] for prompt in PROMPTS}
        assert name not in names or change(live, "unload", name).status_code == 200
    assert len(set(expected.values())) > 15

    async def stream(client: httpx.AsyncClient, number: int) -> None:
        for turn in range(3):
            model = ["base", "low", *names, *names][(number + turn) % 8]
            asked = body_of(model, prompt := PROMPTS[number % 4], stream=True)
            answer = await client.post("/v1/completions", json=asked)
            seen[f"{model in names} {answer.status_code}"] += 1
            if answer.status_code == 200:
                lines = answer.text.split("data: ")[1:-1]
                parts = [json.loads(line)["choices"][0]["text"] for line in lines]
                assert "".join(parts) == expected[model, prompt]
            else:
                await asyncio.sleep(0.1)

    async def operate(client: httpx.AsyncClient) -> None:
        """Loads what is not there as soon as it can, and unloads what came first."""
        there = list[str]()
        while not over.is_set() or seen["loaded"] < 4:
            name = next(one for one in names if one not in there)
            path = {"lora_name": name, "lora_path": name}
            answer = await client.post("/v1/load_lora_adapter", json=path)
            if answer.status_code == 200:
                there.append(name)
                seen["loaded"] += 1
            else:
                assert answer.json()["error"]["code"] == "no_place"
                await asyncio.sleep(0.02)
            if len(there) == 2:
                gone = {"lora_name": there.pop(0)}
                assert (await client.post("/v1/unload_lora_adapter", json=gone)).is_success
        await client.post("/v1/unload_lora_adapter", json={"lora_name": there[0]})

    async def go() -> None:
        most = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE, limits=most) as client:
            operator = asyncio.create_task(operate(client))
            await asyncio.gather(*(stream(client, number) for number in range(100)))
            over.set()
            await operator

    asyncio.run(go())
    assert seen["False 200"] == 75 and seen["True 200"] > 20, seen
    assert seen["True 200"] + seen["True 404"] == 225


LM_HEAD = "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "edit", "message"),
    [
        ({"use_dora": True}, None, "use_dora cannot be served"),
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights cannot"),
        ({"modules_to_save": ["x"], "bias": "all"}, None, "bias, modules_to_save cannot"),
        ({"alpha_pattern": {"(a+)+b": 1}}, None, "too hard to match"),
        ({"alpha_pattern": {"a": "b"}}, None, "could not convert"),
        ({"lora_alpha": 1e30}, None, "numbers beyond 10000"),
        ({"peft_type": "IA3"}, None, "no adapter of the type LORA"),
        ({}, lambda name, x: {LM_HEAD: x}, "lm_head.*not served"),
        ({}, lambda name, x: {name: x * np.nan}, "numbers beyond 10000"),
        ({}, lambda name, x: {name: x, name.replace("A.", "B."): x.T * np.nan}, "beyond 10000"),
        ({}, lambda name, x: {name: np.tile(x, 2)}, "and width 64, and there is room for"),
        ({}, lambda name, x: {name: np.tile(x, (9, 1))}, "are no pair"),
        ({}, -100, "truncated or broken"),
        ({}, 0, "truncated or broken"),
    ],
)
def test_broken_folders(
    live: Live, made: Made, config: dict[str, Any], edit: Any, message: str
) -> None:
    shutil.rmtree(folder := made.adapters / "broken", ignore_errors=True)
    shutil.copytree(made.adapters / "low", folder)
    about, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    about.write_text(json.dumps(json.loads(about.read_text()) | config))
    if isinstance(edit, int):
        file.write_bytes(file.read_bytes()[:edit])
    elif edit is not None:
        tensors = load_file(file)
        first = next(iter(tensors))
        save_file({**tensors, **edit(first, tensors.pop(first))}, file)
    answer = change(live, "load", "x", "broken")
    found = answer.json()["error"]
    assert answer.status_code == 400 and "\n" not in found["message"]
    assert re.search(message, found["message"]), found
    assert text(live, "low", "a")[0]


def test_paths_that_lead_elsewhere(live: Live, made: Made) -> None:
    (made.adapters / "link").symlink_to("/etc")
    (made.adapters / "empty").mkdir()
    paths = ["", ".", "..", "/etc", "/dev/zero", "no", "a\0b", "a" * 9999, "link", "empty", None]
    for path, name in itertools.product(paths, ("x", "low", "\n", "")):
        answer = change(live, "load", name, path)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]
    for body in ({"lora_name": 1}, {"lora_name": "x", "lora_path": "all", "load_inplace": True}):
        assert post(f"{live.url}/v1/load_lora_adapter", json=body).status_code == 400
    assert [change(live, "unload", name).status_code for name in ("x", "base")] == [404, 404]
    assert change(live, "load", "low", "low").status_code == 400
    with serving() as plain:
        assert [change(plain, how, "x", "y").status_code for how in ("load", "unload")] == [403] * 2
    with serving(options=ServerOptions(adapters_from=str(made.adapters))) as plain:
        assert change(plain, "load", "x", "all").json()["error"]["code"] == "no_place"


def test_merged_into_the_weights_as_peft_merges(made: Made) -> None:
    merged = made.theirs("all").merge_and_unload().state_dict()
    with hf_source(made.model) as source:
        # As if they were stored quantized, too, which would leave the adapter out.
        held = {n: dataclasses.replace(x, parts={"values": x}) for n, x in source.tensors.items()}
        source = dataclasses.replace(source, tensors=held)
        for name, tensor in merged_source(source, made.adapters / "all").tensors.items():
            assert ("_proj." in name) == (not tensor.parts)
            np.testing.assert_allclose(np.asarray(tensor), merged[name].numpy(), atol=1e-5)


@pytest.mark.heavy
def test_every_process_loads_them(made: Made, live: Live, tmp_path: Path) -> None:
    flags = [f"--adapter=low={made.adapters / 'low'}", f"--adapters_from={made.adapters}"]
    with Pair(tmp_path, made.bundle, (tmp_path / "cache",) * 2, *flags) as pair:
        first, two = pair.processes[0], live._replace(url=pair.url)
        wait_until(lambda: '"ready: ' in first.said or not first.process.is_alive())
        assert [change(one, "load", "sql", "all").status_code for one in (live, two)] == [200] * 2
        for model in ("base", "low", "sql", "low"):
            assert text(two, model, PROMPTS[0])[0] == text(live, model, PROMPTS[0])[0]
    change(live, "unload", "sql")
