"""Adapters of a Llama: trained alone, on any mesh as on one device, and as PEFT trains them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import spmd
from spmd.models.llama import lora
from spmd.models.llama.config import ConfigError
from spmd.models.llama.fresh import init
from spmd.models.llama.lora import LoraConfig
from spmd.models.llama.model import forward
from spmd.models.llama.program import LlamaProgram
from spmd.models.llama.weights import load as weights
from spmd.models.training.checkpoints.tables import by_path
from spmd.models.training.run.optimizer import OptimizerConfig
from tests.models.llama.made import LATENT, assert_close
from tests.models.llama.test_program import make_run, take, windows

LORA = LoraConfig(rank=4, alpha=6.0)
RATE, STEPS = 1e-2, 20


def make_program(mesh, **changes):
    optimizer = OptimizerConfig(
        name="adamw", learning_rate=RATE, schedule="constant", warmup_steps=0, clip_norm=None
    )
    run = dataclasses.replace(make_run(mesh, **changes), lora=LORA, optimizer=optimizer)
    return LlamaProgram(run, spmd.make_mesh(**mesh), windows(run).struct())


@functools.cache
def alone():
    program = make_program({"data": 1})
    return take(program, program.fresh_state(), 6)[1]


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 4, "model": 2}, {}),
        pytest.param({"data": 2, "stage": 2}, {"stages": 2, "stage_microbatches": 2},
                     marks=pytest.mark.thorough),
    ],
    ids=["2d", "stages"],
)  # fmt: skip
def test_on_a_mesh_as_on_one_device(mesh, changes):
    program = make_program(mesh, **changes)
    state = program.fresh_state()
    assert {path.split("/")[-1] for path in by_path(program.targets().params)} == {
        "lora_A",
        "lora_B",
    }
    assert not [path for path in by_path(state.opt_state) if "/base/" in path]
    np.testing.assert_allclose(take(program, state, 6)[1], alone(), rtol=1e-5)
    assert alone()[-1] < alone()[0] - 0.02


def test_merged_it_is_the_model_with_adapters():
    program = make_program({"data": 4, "model": 2})
    base = jax.device_put(init(jax.random.key(3), program.model), program.base_shardings())
    params = program.fresh_state(base, seed=1).params
    params = {**params, "lora": jax.tree.map(lambda x: x + 0.1, params["lora"])}
    inputs = windows(program.run)(0)["inputs"]
    logits = functools.partial(forward, tokens_BS=inputs, config=program.model)
    expected, plain = logits(lora.applied(params, LORA)), logits(params["base"])
    whole = program.whole(params)
    up, before = (tree["layers"]["mlp"]["up_proj"]["weight"] for tree in (whole, params["base"]))
    assert up.sharding == before.sharding
    assert_close(logits(whole), expected, rtol=1e-3, atol=1e-4)
    assert float(jnp.abs(plain - expected).max()) > 0.1


@pytest.mark.parametrize("scan_layers", [True, False])
def test_layers_are_numbered_behind_those_without_experts(tmp_path, scan_layers):
    config = dataclasses.replace(LATENT, scan_layers=scan_layers)
    adapters = lora.init(jax.random.key(1), init(jax.random.key(0), config), LORA)
    lora.save(adapters, LORA, tmp_path / "saved", None)
    found = safetensors.numpy.load_file(tmp_path / "saved" / "adapter_model.safetensors")
    parts = [name.split(".") for name in found]
    assert {p[4] for p in parts} == set("0123") and {p[4] for p in parts if "mlp" in p} == set("01")


@pytest.mark.parametrize("text", ["rang=4", "rank=x", "rank=0", "rank=2,targets=lm_head"])
def test_what_is_no_adapter(text):
    with pytest.raises(ConfigError, match=r"rank=16"):
        LoraConfig.parse(text)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("scan_layers", [True, False])
def test_losses_and_files_are_those_of_peft(tmp_path, scan_layers):
    """The same adapters at first, batches and AdamW; then peft reads what was trained."""
    peft = pytest.importorskip("peft")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    program = make_program({"data": 4, "model": 2}, scan_layers=scan_layers)
    weights.save(init(jax.random.key(0), program.model), program.model, tmp_path / "model")
    state = program.fresh_state(
        weights.load(tmp_path / "model", program.model, program.base_shardings())
    )
    lora.save(state.params["lora"], LORA, tmp_path / "first", None)

    def as_peft(folder, trains):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        return peft.PeftModel.from_pretrained(model, tmp_path / folder, is_trainable=trains)

    def tokens(step):
        batch = windows(program.run)(step)
        return [torch.tensor(batch[name], dtype=torch.long) for name in ("inputs", "targets")]

    theirs, losses = as_peft("first", True), []
    trained = [p for p in theirs.parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * program.model.num_hidden_layers
    optimizer = torch.optim.AdamW(trained, RATE, (0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        inputs, targets = tokens(step)
        logits = theirs(inputs).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state, ours = take(program, state, STEPS)
    print("largest difference of losses:", np.abs(np.subtract(ours, losses)).max())
    np.testing.assert_allclose(ours, losses, atol=1e-5)
    assert losses[-1] < losses[0] - 0.05

    lora.save(state.params["lora"], LORA, tmp_path / "trained", str(tmp_path / "model"))
    weights.save(program.whole(state.params), program.model, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = theirs(tokens(5)[0]).logits
        for model in (as_peft("trained", False), merged):
            assert_close(model(tokens(5)[0]).logits, expected, rtol=1e-3, atol=1e-3)
