"""PyTorch modules on a mesh: a module's forward pass, its training step, and its export.

torchax traces a module's torch ops as jax ops, and `spmd.jit` partitions them. Parameters, buffers
and inputs have torch's names. Needs `pip install "spmd[torch]"`, and `import spmd.torch`.
"""

from spmd.torch.install import load_torchax

load_torchax()  # before our modules, which import it

from spmd.torch.functional import Exported, call_jax, export, functional  # noqa: E402
from spmd.torch.held import Sharded, TrainStep, shard, train_step  # noqa: E402

__all__ = [
    "Exported", "Sharded", "TrainStep", "call_jax", "export", "functional", "shard", "train_step",
]  # fmt: skip
