"""Adapters that PEFT wrote, served beside one base: PEFT's numbers, and each has its own text."""

import asyncio
import dataclasses
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
import safetensors.numpy

import spmd
from spmd.models.decode import ServingShape
from spmd.models.llama.lora import merged_source
from spmd.models.llama.weights.sources import hf_source
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.read import load_bundle
from spmd.serving.engine.actions import GREEDY
from spmd.serving.engine.backend import SlotPart, Stepped
from spmd.serving.engine.model_backend import ModelBackend
from spmd.serving.errors import ServingError
from spmd.serving.http.limits import ServerOptions
from spmd.serving.language_backend import model_backend, put_adapter
from spmd.serving.llama_bundle import write_llama_bundle
from spmd.serving.load import check_adapters, load_model
from tests.models.llama.weights import checkpoints
from tests.serving.http.live import Live, post, serving, wired
from tests.serving.test_several_processes import Pair
from tests.waiting import PATIENCE, wait_until

pytest.importorskip("torch")
pytest.importorskip("transformers")
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
    "mlp": {
        "r": 4, "target_modules": r".*\.mlp\.(up|down)_proj", "layers_to_transform": None,
        "lora_alpha": 4,
    },
    "last": {"r": 8, "target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
}  # fmt: skip
PROMPTS = ["Once upon a time", "def main(", "a", "The mesh of"]


class Made(NamedTuple):
    model: Path
    adapters: Path
    bundle: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Made:
    """A Llama of transformers', PEFT's adapters of it, and its bundle."""
    import torch
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # those of peft; pytest sets them back
    folder: Path = tmp_path_factory.mktemp("adapters")
    found = Made(folder / "model", folder / "peft", folder / "base")
    checkpoints.write("grouped", found.model, vocab_size=V)
    for number, (name, config) in enumerate(TRAINED.items()):
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_pretrained(found.model)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        peft.get_peft_model(model, lora).save_pretrained(found.adapters / name)
    with hf_source(found.model) as source:
        source = dataclasses.replace(source, tokenizer_from=None)  # texts are bytes
        write_llama_bundle(
            source, found.bundle, SHAPE, dtype="float32", name="base", platforms=["cpu"]
        )
    return found


def theirs(made: Made, name: str | None, tokens: list[int]) -> Any:
    """What PEFT says of the token behind some others: log-probabilities (V,)."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(made.model)
    if name is not None:
        model = peft.PeftModel.from_pretrained(model, made.adapters / name)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1].double()
    return torch.log_softmax(logits, -1).numpy()


def run_all(backend: ModelBackend, places: list[int]) -> tuple[list[list[int]], Stepped]:
    """A step of a sequence in each slot, with the adapters of these places."""
    rng = np.random.default_rng(0)
    pages, parts, prompts = 64 // 8, list[SlotPart](), list[list[int]]()
    for slot, place in enumerate(places):
        prompts.append(rng.integers(0, V, 3 + slot % 4).tolist())
        backend.begin(slot, GREEDY, prompts[-1])
        held = tuple(range(slot % 4 * pages, (slot % 4 + 1) * pages))
        parts.append(SlotPart(slot, 0, tuple(prompts[-1]), held, True, adapter=place))
    return prompts, backend.step(parts)()


def distributions(stepped: Stepped) -> Any:
    """(slots, V) log-probabilities behind each."""
    order = np.argsort(stepped.drawn.top_ids, axis=-1)
    return np.take_along_axis(stepped.drawn.top_logprobs, order, -1)


def test_ranks_mixed_in_one_batch_on_a_mesh_are_pefts(made: Made, devices8: Any) -> None:
    mesh = spmd.make_mesh(data=2, model=2, devices=devices8[:4])
    bundle = load_bundle(made.bundle, mesh, functions=("begin", "adapt", "step_r32_t64"))
    split = {
        path: x.sharding.spec for path, x in bundle.state.items() if "adapters/layers/0" in path
    }
    assert split["state/adapters/layers/0/self_attn/q_proj/lora_B"][2] == "model"
    assert split["state/adapters/layers/0/mlp/down_proj/lora_A"][2] == "model"
    backend = model_backend(bundle)
    names = ["low", "all", "mlp"]
    _, plain = run_all(backend, [-1] * 8)
    compiled = backend.compile_total
    for place, name in enumerate(names):
        put_adapter(bundle, place, str(made.adapters / name))
    prompts, mixed = run_all(backend, places := [-1, 0, 1, 2, 1, -1, 2, 0])
    found, before = distributions(mixed), distributions(plain)
    for slot, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        wanted = theirs(made, None if place < 0 else names[place], prompt)
        np.testing.assert_allclose(found[slot], wanted, rtol=0, atol=2e-4)
        assert np.array_equal(found[slot], before[slot]) == (place < 0)  # the base's, bit for bit
    put_adapter(bundle, 1, str(made.adapters / "last"))  # nothing of "all" is left
    found = distributions(run_all(backend, places)[1])
    np.testing.assert_allclose(found[2], theirs(made, "last", prompts[2]), rtol=0, atol=2e-4)
    assert backend.compile_total == compiled


@pytest.fixture(scope="module")
def live(made: Made, devices8: Any) -> Iterator[Live]:
    """A server whose model is at the other end of a line, with one adapter from the start."""
    mesh = spmd.make_mesh(data=1, devices=devices8[:1])
    bundle = load_bundle(made.bundle, mesh, symbols={"pages": 20})
    given = {"low": str(made.adapters / "low")}
    check_adapters(made.bundle, None, given)
    loaded = load_model(bundle, made.bundle, adapters=given)
    assert loaded.backend is not None
    root = ServerOptions(adapters_from=str(made.adapters), max_waiting=1000)
    with (
        wired(loaded.backend, None, loaded.adapt) as core,
        serving(options=root, load=False) as running,
    ):
        apart = dataclasses.replace(loaded, backend=None, core=core, adapt=core.adapt)
        running.service.become_ready(apart)
        yield running
        running.wait_idle()


def change(live: Live, what: str, name: str, path: str = "") -> httpx.Response:
    body = {"lora_name": name, **({"lora_path": path} if path else {})}
    return post(f"{live.url}/v1/{what}_lora_adapter", json=body)


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
    made = client.completions.create(model="sql", prompt="a", max_tokens=4, temperature=0)
    assert made.model == "sql"
    assert change(live, "unload", "sql").status_code == 200
    with pytest.raises(
        openai.NotFoundError, match="there is no 'sql' here; this server has 'base'"
    ):
        client.completions.create(model="sql", prompt="a")


def test_pages_are_never_anothers(live: Live) -> None:
    long = "a prompt of several pages of the pool"
    base, _ = text(live, "base", long)
    assert text(live, "base", long) == (base, 32)
    low, cached = text(live, "low", long)
    assert low != base and cached == 0
    assert text(live, "low", long) == (low, 32)
    assert text(live, "base", long, cache_salt="1 ") == (base, 0)  # as that of an adapter begins
    assert text(live, "low", long, cache_salt="x") == (low, 0)


def test_they_come_and_go_while_a_hundred_streams_run(live: Live) -> None:
    """Places for two, which three take in turn: each stream has its own text, whole, or a 404."""
    names = ["all", "mlp", "last"]
    expected = dict[tuple[str, str], str]()
    for name in names:
        assert change(live, "load", name, name).status_code == 200
        expected |= {(name, prompt): text(live, name, prompt)[0] for prompt in PROMPTS}
        assert change(live, "unload", name).status_code == 200
    for name in ("base", "low"):
        expected |= {(name, prompt): text(live, name, prompt)[0] for prompt in PROMPTS}
    assert len(set(expected.values())) > 15
    seen, over = Counter[str](), asyncio.Event()

    async def go() -> None:
        most = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE, limits=most) as client:

            async def stream(number: int) -> None:
                for turn in range(3):
                    model = ["base", "low", *names, *names][(number + turn) % 8]
                    prompt = PROMPTS[number % 4]
                    asked = body_of(model, prompt, stream=True)
                    answer = await client.post("/v1/completions", json=asked)
                    seen[f"{model in names} {answer.status_code}"] += 1
                    if answer.status_code == 200:
                        lines = answer.text.split("data: ")[1:-1]
                        parts = [json.loads(line)["choices"][0]["text"] for line in lines]
                        assert "".join(parts) == expected[model, prompt]
                    else:
                        assert answer.status_code == 404 and model in names
                        await asyncio.sleep(0.1)

            async def operate() -> None:
                """Unloads what came first, and loads what is not there as soon as it can."""
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
                        answer = await client.post("/v1/unload_lora_adapter", json=gone)
                        assert answer.status_code == 200
                for name in there:
                    await client.post("/v1/unload_lora_adapter", json={"lora_name": name})

            operator = asyncio.create_task(operate())
            await asyncio.gather(*(stream(number) for number in range(100)))
            over.set()
            await operator

    asyncio.run(go())
    assert seen["False 200"] == 75 and seen["True 200"] > 20, seen
    assert seen["True 200"] + seen["True 404"] == 225


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora cannot be served"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights cannot"),
    "head": ({"modules_to_save": ["lm_head"], "bias": "all"}, "bias, modules_to_save cannot"),
    "hard": ({"alpha_pattern": {"(a+)+b": 1}}, "too hard to match"),
    "alpha": ({"lora_alpha": 1e30}, "numbers beyond 10000"),
    "not": ({"peft_type": "IA3"}, "no adapter of the type LORA"),
}


@pytest.mark.parametrize("name", [*BROKEN, "cut", "empty", "embedding", "nan", "wide", "rank"])
def test_broken_folders_are_refused_in_one_line(live: Live, made: Made, name: str) -> None:
    folder = made.adapters / f"broken_{name}"
    shutil.copytree(made.adapters / "low", folder)
    config, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    first, message = next(iter(tensors)), BROKEN.get(name, ({}, ""))[1]
    content = json.loads(config.read_text()) | BROKEN.get(name, ({}, ""))[0]
    config.write_text(json.dumps(content))
    if name == "cut":
        file.write_bytes(file.read_bytes()[:-100])
        message = "truncated or broken"
    elif name == "empty":
        file.unlink()
        message = "has no adapter_model.safetensors"
    elif name not in BROKEN:
        values = tensors.pop(first)
        changed: dict[str, tuple[str, Any, str]] = {
            "embedding": ("base_model.model.lm_head.lora_A.weight", values, "lm_head.*not served"),
            "nan": (first, values * np.nan, "numbers beyond 10000"),
            "wide": (first, np.tile(values, 2), "of rank 2 and width 64, and there is room for"),
            "rank": (first, np.tile(values, (9, 1)), "are no pair"),
        }
        *one, message = changed[name]
        safetensors.numpy.save_file(tensors | dict([one]), file)
    answer = change(live, "load", "x", folder.name)
    assert answer.status_code == 400
    found = answer.json()["error"]
    assert found["param"] == "lora_path" and "\n" not in found["message"]
    assert re.search(message, found["message"]), found
    assert text(live, "base", "a")[0] == text(live, "base", "a")[0] != ""


@pytest.mark.parametrize(
    "path", ["", ".", "..", "../..", "/etc", "/dev/zero", "no", "a\0b", "a" * 9999]
)
def test_paths_that_lead_elsewhere(live: Live, made: Made, path: str) -> None:
    (made.adapters / "link").unlink(missing_ok=True)
    (made.adapters / "link").symlink_to("/etc")
    for one in (path, "link"):
        answer = change(live, "load", "x", one)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]
    wrong = [{}, {"lora_name": "low", "lora_path": "all"}, {"lora_name": 1}, {"lora_name": "\n"}]
    for body in (*wrong, {"lora_name": "x", "lora_path": "all", "load_inplace": True}):
        assert post(f"{live.url}/v1/load_lora_adapter", json=body).status_code == 400
    assert change(live, "unload", "x").status_code == 404
    assert change(live, "load", "low", "low").status_code == 400


def test_without_a_folder_or_room_there_are_none(made: Made) -> None:
    with serving() as plain:
        assert change(plain, "load", "x", "/etc").status_code == 403
        assert change(plain, "unload", "x").status_code == 403
    with serving(options=ServerOptions(adapters_from=str(made.adapters))) as plain:
        answer = change(plain, "load", "x", "all")
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_place"
    with pytest.raises(ServingError, match="adapters_from"):
        ServerOptions(adapters_from="/nowhere")
    for names, message in (("abcd", "room for 3 adapters, not for 4"), (["base"], "take another")):
        with pytest.raises(BundleError, match=message):
            check_adapters(made.bundle, None, names)


def test_merged_into_the_weights(made: Made) -> None:
    """As PEFT merges it."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(made.model)
    merged = peft.PeftModel.from_pretrained(model, made.adapters / "all").merge_and_unload()
    with hf_source(made.model) as source:
        found = merged_source(source, made.adapters / "all")
        for name, wanted in merged.state_dict().items():
            if name in found.tensors:
                ours = np.asarray(found.tensors[name])
                np.testing.assert_allclose(ours, wanted.numpy(), rtol=0, atol=1e-5)


@pytest.mark.heavy
def test_every_process_loads_them(made: Made, live: Live, tmp_path: Path) -> None:
    flags = [f"--adapter=low={made.adapters / 'low'}", f"--adapters_from={made.adapters}"]
    with Pair(tmp_path, made.bundle, (tmp_path / "cache",) * 2, *flags) as pair:
        first = pair.processes[0]
        wait_until(lambda: '"ready: ' in first.said or not first.process.is_alive())
        two = live._replace(url=pair.url)
        for server in (live, two):
            assert change(server, "load", "sql", "all").status_code == 200
        assert change(two, "load", "bad", "model").status_code == 400
        for model in ("base", "low", "sql", "low"):
            assert text(two, model, PROMPTS[0])[0] == text(live, model, PROMPTS[0])[0]
    assert change(live, "unload", "sql").status_code == 200
