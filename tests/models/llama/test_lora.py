"""Adapters of a Llama: trained alone, on any mesh as on one device, and as PEFT trains them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.models.llama import lora, objective
from spmd.models.llama.config import ConfigError
from spmd.models.llama.fresh import init
from spmd.models.llama.lora import LoraConfig
from spmd.models.llama.model import forward
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.program import LlamaProgram
from spmd.models.llama.weights import load as weights
from spmd.models.training.checkpoints.tables import by_path
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.description import RunConfig
from spmd.models.training.run.loop import Loop, Schedule
from spmd.models.training.run.optimizer import OptimizerConfig
from tests.models.llama.made import assert_close
from tests.models.training.notes import Notes

TINY = dataclasses.replace(CONFIGS["tiny"], attention="einsum")
LORA = LoraConfig(rank=4, alpha=6.0)
RATE, STEPS = 1e-2, 20


def tokens(step):
    rows = np.random.default_rng(step % 2).integers(0, 256, (8, 17)).astype(np.int32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def make_program(mesh, adapters=LORA, **changes):
    run = RunConfig(
        model=dataclasses.replace(TINY, **changes),
        optimizer=OptimizerConfig(
            name="adamw", learning_rate=RATE, schedule="constant", warmup_steps=0, clip_norm=None
        ),
        options=TrainerOptions(steps=STEPS),
        mesh=mesh,
        seq_len=16,
        global_batch=8,
        lora=adapters,
    )
    size = mesh.get("data", 1) * mesh.get("model", 1) * mesh.get("stage", 1)
    structs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tokens(0)))
    return LlamaProgram(run, spmd.make_mesh(**mesh, devices=jax.devices()[:size]), structs)


def train(program, state, steps):
    """The parameters after so many steps in all, and the losses of those taken."""
    notes, schedule = Notes(), Schedule(steps=steps)
    batches = map(program.place, map(tokens, itertools.count(state.step)))
    loop = Loop(program.step, state, batches, schedule, cost=program.cost, sinks=[notes])
    return loop.run().params, [record["loss"] for record in notes]


@functools.cache
def alone():
    """Losses of plain jax on one device."""
    base = init(jax.random.key(0), TINY)
    trained = lora.init(jax.random.key(0), base, LORA)
    optimizer = optax.adamw(RATE, b1=0.9, b2=0.95, weight_decay=0.1)
    state, losses = optimizer.init(trained), []

    @jax.jit
    def take(trained, state, batch):
        def loss(trained):
            params = lora.applied({"base": base, "lora": trained}, LORA)
            return objective.loss(params, batch["inputs"], batch["targets"], TINY)

        value, grads = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, value

    for step in range(6):
        trained, state, value = take(trained, state, tokens(step))
        losses.append(float(value))
    return losses


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
    assert all(path.split("/")[-1].startswith("lora_")
               for path in by_path(program.targets().params))  # fmt: skip
    assert not [path for path in by_path(state.opt_state) if "/base/" in path]
    np.testing.assert_allclose(train(program, state, 6)[1], alone(), rtol=2e-5)
    assert alone()[-1] < alone()[0] - 0.02


def test_merged_it_is_the_model_with_adapters():
    program = make_program({"data": 4, "model": 2})
    base = jax.device_put(init(jax.random.key(3), TINY), program.base_shardings())
    params = program.fresh_state(base, seed=1).params
    kick = functools.partial(jax.tree.map, lambda x: x + 0.1)
    params = {**params, "lora": kick(params["lora"])}
    logits = functools.partial(forward, tokens_BS=tokens(0)["inputs"], config=TINY)
    expected, plain = logits(lora.applied(params, LORA)), logits(params["base"])
    whole = program.whole(params)
    up = whole["layers"]["mlp"]["up_proj"]["weight"]
    assert up.sharding == params["base"]["layers"]["mlp"]["up_proj"]["weight"].sharding
    assert_close(logits(whole), expected, rtol=1e-3, atol=1e-4)
    assert float(jnp.abs(plain - expected).max()) > 0.1


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
    params = init(jax.random.key(0), program.model)
    weights.save(params, program.model, tmp_path / "model")
    state = program.fresh_state(weights.load(tmp_path / "model", program.model,
                                             program.base_shardings()))  # fmt: skip
    lora.save(state.params["lora"], LORA, tmp_path / "first", None)

    def as_peft(folder, trains):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        return peft.PeftModel.from_pretrained(model, tmp_path / folder, is_trainable=trains)

    theirs, losses = as_peft("first", True), []
    trained = [p for p in theirs.parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * TINY.num_hidden_layers
    optimizer = torch.optim.AdamW(trained, RATE, (0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        batch = {name: torch.tensor(x, dtype=torch.long) for name, x in tokens(step).items()}
        logits = theirs(batch["inputs"]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    params, ours = train(program, state, STEPS)
    print("largest difference of losses:", np.abs(np.subtract(ours, losses)).max())
    np.testing.assert_allclose(ours, losses, atol=1e-5)
    assert losses[-1] < losses[0] - 0.1

    lora.save(params["lora"], LORA, tmp_path / "trained", str(tmp_path / "model"))
    weights.save(program.whole(params), program.model, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor(tokens(5)["inputs"], dtype=torch.long)
    with torch.no_grad():
        expected = theirs(ids).logits
        assert_close(as_peft("trained", False)(ids).logits, expected, rtol=1e-3, atol=1e-3)
        assert_close(merged(ids).logits, expected, rtol=1e-3, atol=1e-3)
