"""The PyTorch peer of `benchmarks/run train`: a Llama under FSDP2 and torch.compile.

The same sizes, batch and AdamW; bf16 compute on float32 parameters, float32 reductions, fused
AdamW, cuDNN's or flash attention, whichever PyTorch takes. Layers are compiled one by one, as
torchtitan does it. Each process drives one GPU; process 0 prints one line of JSON. `measure` starts
them all.

Source: PyTorch's `torch.distributed.fsdp.fully_shard`, version 2.11.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from benchmarks.compiled_ahead import model_of
from benchmarks.kinds import SECONDS, Kinds, joules, kinds_of, of_torch
from spmd.models.llama.config import LlamaConfig

WARM, PROFILED = 3, 2


class Result(NamedTuple):
    """What the peer took."""

    seconds: float  # of one step, the median
    ahead: float  # of one step where none is waited for
    joules: float  # of process 0's GPU in such a step
    compile_seconds: float  # until the first steps were done
    bytes: int  # the most memory that was held
    loss: float  # the last one
    version: str  # PyTorch's
    kinds: Kinds  # of process 0's GPU


def measure(model: str, layers: int, gpus: int, batch: int, seq_len: int, steps: int) -> Result:
    """Starts a process for each GPU, and waits for them.

    Raises:
      RuntimeError: they failed; the message ends with what they printed.
    """
    sizes = {"layers": layers, "global_batch": batch, "seq_len": seq_len, "steps": steps}
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [sys.executable, "-m", *launch, "-m", "benchmarks.torch_fsdp"]
    command.append(json.dumps({"model": model, **sizes}))
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        raise RuntimeError(f"PyTorch's processes failed:\n{(ran.stdout + ran.stderr)[-4000:]}")
    found = json.loads(lines[-1])
    return Result(**{**found, "kinds": Kinds(*found["kinds"])})


def _model(config: LlamaConfig) -> Any:
    """The module, without its parameters' memory."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    hidden, heads, kv_heads = (config.hidden_size, config.num_attention_heads, config.kv_heads)
    head_dim = config.head_width

    def linear(rows: int, columns: int) -> nn.Linear:
        return nn.Linear(rows, columns, bias=False)

    def rotated(x_BHTD: Any, cos_TD: Any, sin_TD: Any) -> Any:
        first, second = x_BHTD.chunk(2, -1)
        return torch.cat((first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD), -1)

    class Layer(nn.Module):  # type: ignore[misc]  # torch is not typed where it is missing
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.RMSNorm(hidden, config.rms_norm_eps)
            self.q = linear(hidden, heads * head_dim)
            self.k, self.v = (linear(hidden, kv_heads * head_dim) for _ in range(2))
            self.o = linear(heads * head_dim, hidden)
            self.between = nn.RMSNorm(hidden, config.rms_norm_eps)
            self.gate, self.up = (linear(hidden, config.intermediate_size) for _ in range(2))
            self.down = linear(config.intermediate_size, hidden)

        def forward(self, x_BTE: Any, cos_TD: Any, sin_TD: Any) -> Any:
            size, length, _ = x_BTE.shape
            h_BTE = self.before(x_BTE)
            q, k, v = (
                product(h_BTE).view(size, length, -1, head_dim).transpose(1, 2)
                for product in (self.q, self.k, self.v)
            )
            q, k = rotated(q, cos_TD, sin_TD), rotated(k, cos_TD, sin_TD)
            is_grouped = heads != kv_heads
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
            x_BTE = x_BTE + self.o(out.transpose(1, 2).reshape(size, length, -1))
            h_BTE = self.between(x_BTE)
            return x_BTE + self.down(F.silu(self.gate(h_BTE)) * self.up(h_BTE))

    class Llama(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(config.vocab_size, hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(config.num_hidden_layers))
            self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
            self.head = linear(hidden, config.vocab_size)

        def forward(self, tokens_BT: Any) -> Any:
            x_BTE = self.embed(tokens_BT)
            at_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            powers = torch.arange(0, head_dim, 2, device=tokens_BT.device) / head_dim
            angles_TD = at_T[:, None] * config.rope_theta**-powers
            cos_TD, sin_TD = angles_TD.cos().to(x_BTE.dtype), angles_TD.sin().to(x_BTE.dtype)
            for layer in self.layers:
                x_BTE = layer(x_BTE, cos_TD, sin_TD)
            return self.head(self.norm(x_BTE))

    with torch.device("meta"):
        return Llama()


def _sharded(config: LlamaConfig, gpus: int) -> Any:
    """The module with each layer compiled, and its parameters split over all GPUs."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = _model(config)
    mesh = init_device_mesh("cuda", (gpus,))
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in module.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    module.to_empty(device="cuda")
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    return module


def _run(given: argparse.Namespace) -> Result | None:
    """Trains, in each process; the result of the first."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    gpus, is_first = dist.get_world_size(), dist.get_rank() == 0
    config = model_of(given.model, given.layers)
    module = _sharded(config, gpus)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4, fused=True)
    shape = (given.global_batch // gpus, given.seq_len)
    inputs, targets = torch.randint(0, config.vocab_size, (2, *shape), device="cuda")

    @torch.compile  # type: ignore[untyped-decorator]
    def loss_of(logits: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step() -> Any:
        loss = loss_of(module(inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def timed(count: int) -> float:
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    start = time.perf_counter()
    timed(WARM)
    compiled = time.perf_counter() - start
    seconds = statistics.median(timed(1) for _ in range(given.steps))
    longest = torch.tensor(seconds, device="cuda")
    dist.all_reduce(longest, dist.ReduceOp.MAX)  # all processes take as many steps
    count = max(given.steps, math.ceil(SECONDS / longest.item()))
    before = joules()
    ahead = timed(count)
    energy = (joules() - before) / count
    steps = []
    for _ in range(PROFILED):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            timed(1)
        steps.append(of_torch(profile))
    loss, held = step().item(), torch.cuda.max_memory_allocated()
    dist.destroy_process_group()
    if not is_first:
        return None
    kinds = kinds_of(steps)
    return Result(seconds, ahead, energy, compiled, held, loss, torch.__version__, kinds)


def main() -> None:
    """One process of the peer."""
    if result := _run(argparse.Namespace(**json.loads(sys.argv[1]))):
        print(json.dumps(result._asdict()), flush=True)


if __name__ == "__main__":
    main()
