"""MaxText's training step, its model, loss and optimizer as they are, split by marks alone.

MaxText is told of one device. It has to be there: `pip install maxtext` and what it needs.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools
from pathlib import Path

import jax
import maxtext
import numpy as np
from flax import nnx
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.optimizers.optimizers import get_optimizer
from maxtext.trainers.pre_train.train import train_step
from maxtext.utils import maxtext_utils
from maxtext.utils.model_creation_utils import create_nnx_abstract_model

import spmd

SIZES = {
    "base_num_decoder_layers": 2, "base_emb_dim": 256, "base_mlp_dim": 1024, "head_dim": 32,
    "base_num_query_heads": 8, "base_num_kv_heads": 4, "vocab_size": 2048,
    "max_target_length": 128, "per_device_batch_size": 16, "attention": "dot_product",
    "dataset_type": "synthetic", "enable_checkpointing": False, "log_config": False,
    "run_name": "step", "hardware": "cpu", "skip_jax_distributed_system": True,
    "steps": 100, "learning_rate": 1e-3, "warmup_steps_fraction": 0.0,
}  # fmt: skip
base = Path(maxtext.__file__).parent / "configs" / "base.yml"
config = pyconfig.initialize(["", str(base), *(f"{k}={v}" for k, v in SIZES.items())])
alone = maxtext_utils.get_mesh_from_config(config, devices=jax.devices()[:1])
make_model, _ = create_nnx_abstract_model(config, alone)
optimizer = get_optimizer(config, maxtext_utils.create_learning_rate_schedule(config))


def first_state():
    model = make_model()
    return TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))


graph, state = nnx.split(nnx.eval_shape(first_state))
mesh = spmd.make_mesh(data=4, model=2)
rules = {
    "model/*embedding*": ("model", "data"),
    "model/*logits_dense/kernel*": ("data", "model"),
    "model/*mlp/wi_*": ("data", None, "model"),  # the layers are in the middle
    "model/*mlp/wo/*": ("model", None, "data"),
    "model/*self_attention/out/*": ("model", None, None, "data"),
    "model/*self_attention/*/kernel*": ("data", None, "model", None),
}
state = spmd.mark_tree(state, mesh, rules)
batch = spmd.mark_tree(maxtext_utils.get_shaped_batch(config), mesh, {"*": ("data", None)})
step = functools.partial(train_step, graph, config, None, None)
compiled = spmd.jit(step, mesh=mesh, donate_argnums=0).compile(state, batch)
print(compiled.summary().splitlines()[1].strip())

tokens = np.random.default_rng(0).integers(0, 2048, (128, 129), dtype=np.int32)
ones, places = np.ones((128, 128), np.int32), np.full((128, 128), np.arange(128), np.int32)
batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
batch |= {f"{name}_segmentation": ones for name in ("inputs", "targets")}
batch |= {f"{name}_position": places for name in ("inputs", "targets")}
state = nnx.split(first_state())[1]
by_jax = jax.jit(step)(state, batch)[1]["scalar"]["learning/loss"]
for number in range(10):
    state, metrics = compiled(state, batch)
    loss = metrics["scalar"]["learning/loss"]
    if number == 0:
        print(f"loss {loss:.3f} at first, {by_jax:.3f} by jax.jit")
print(f"loss {loss:.3f} after 10 steps")
