"""The server that benchmarks/loads.py loads: the project's own, over a Llama with random weights.

`loads.py` starts it as `python -m benchmarks.load_server FLAGS`, its own flags as JSON. On stdout
there is one line of JSON when the model is there (what `load` says), one when all its functions
are, and one for each command on stdin:

    profile 2      traces the devices for two seconds; answers `load_trace.Busy`

On SIGTERM, and when stdin ends, it stops as scripts/serve does.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import tokenizers

import spmd
from benchmarks.compiled_ahead import model_of
from benchmarks.decode import random_weights
from benchmarks.load_client import WORDS
from benchmarks.load_trace import read_busy
from spmd.measure.profile import STEP
from spmd.mesh.spec import platform_of
from spmd.mesh.topology import Topology
from spmd.models import decode
from spmd.models.llama.config import ConfigError, LlamaConfig
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.quantize import quantized_types
from spmd.models.llama.weights.tensors import Source
from spmd.scripts.export_llama import make_shape
from spmd.scripts.flags.user_errors import ending_on_interrupt, one_message
from spmd.scripts.serve_bundle import USER_ERRORS
from spmd.serving.bundle.bundle import Bundle
from spmd.serving.bundle.memory import compile_bundle
from spmd.serving.bundle.symbols import take_gpu_memory
from spmd.serving.bundle.write import TOKENIZER
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import ServerOptions
from spmd.serving.http.server import serve
from spmd.serving.language_backend import first_functions, info, served_functions
from spmd.serving.language_bundle import SMALL, check_shape, contract
from spmd.serving.load import load_model

MLIR_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def make_config(given: argparse.Namespace) -> LlamaConfig:
    """The model that the flags name."""
    fields = {"scan_layers": False, "dtype": given.dtype, "param_dtype": given.dtype}
    return model_of(given.model, given.layers, **fields)


def make_bundle(given: argparse.Namespace) -> Bundle:
    """The model with random weights that were made on the devices, and its first functions."""
    take_gpu_memory(given.memory_share)
    config = make_config(given)
    shape = make_shape(Source(config, {}, "random weights"), given)
    check_shape(shape)
    types = quantized_types(config, given.quantize)
    model = LlamaRows(config)
    functions, state, specs, primary = decode.functions(model, shape, types)
    devices = jax.devices()[: given.groups * given.model_axis]
    mesh = spmd.make_mesh(data=given.groups, model=given.model_axis, devices=devices)
    promised = contract(model, shape, dataclasses.asdict(config))
    tags = {function.name: function.tags for function in functions}
    served = served_functions(promised, tags, platform_of(mesh))
    return compile_bundle(
        [function for function in functions if function.name in served],
        mesh,
        weights=types,
        make_weights=functools.partial(random_weights, types, config=config),
        specs={**specs, **SMALL},
        state=state,
        primary=primary,
        symbols=given.symbols,
        memory_share=given.memory_share,
        contract=promised,
        first=first_functions,
    )


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of words: the clients', and numbers as they begin prompts, for all other ids."""
    words = ["</s>", "<unk>", *WORDS]
    words += [f"{number}:" for number in range(vocab_size - len(words))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def costs(bundle: Bundle, given: argparse.Namespace) -> dict[str, Any]:
    """The fields of `workloads.Costs`."""
    config, facts = make_config(given), info(bundle)
    # The embedding's table is looked up in, and the head sees rows that draw: not these.
    parameters = config.num_hidden_layers * sum(
        shape[0] * shape[1]
        for path, shape in config.parameter_shapes().items()
        if path.startswith("layers/") and len(shape) == 2
    )
    topology = Topology.for_devices(bundle.devices)
    seconds = topology.arithmetic_seconds(2.0 * parameters, MLIR_TYPES[config.dtype])
    return {
        "slots": given.slots,
        "weight_bytes": facts["read_weight_bytes"],
        "token_bytes": facts["token_bytes"],
        "bandwidth": given.bandwidth or topology.hbm_bandwidth,
        "token_seconds": seconds / len(bundle.devices),
    }


def load(given: argparse.Namespace, made: queue.SimpleQueue[Bundle]) -> Loaded:
    """The model as the server serves it; says so on stdout, and once all functions are there."""
    started = time.perf_counter()
    bundle = make_bundle(given)
    made.put(bundle)
    for note in bundle.notes:
        print(f"note: {note}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder) / TOKENIZER, make_config(given).vocab_size)
        loaded = load_model(bundle, folder, given.model)
    background = loaded.background
    assert loaded.backend is not None and background is not None

    def settle() -> None:
        background.join()
        say(all_seconds=time.perf_counter() - started)

    say(
        costs=costs(bundle, given),
        longest=loaded.backend.limits.longest,
        pages=loaded.backend.limits.pages,
        budget=given.token_budget or loaded.backend.budget,
        device=f"{len(bundle.devices)} x {bundle.devices[0].device_kind}",
        seconds=time.perf_counter() - started,
    )
    threading.Thread(target=settle, name="settle", daemon=True).start()
    return loaded


def say(**facts: Any) -> None:
    """One line of JSON."""
    print(json.dumps(facts), flush=True)


# Commands


def obey(made: queue.SimpleQueue[Bundle]) -> None:
    """Does what stdin says, until it ends; then whoever started us is gone."""
    bundle = made.get()
    with open(0, encoding="utf-8", closefd=False) as commands:
        for line in commands:
            command, seconds = line.split()
            assert command == "profile", command
            try:
                say(**profile(float(seconds), bundle))
            except Exception as error:  # loads.py waits for a line
                say(error=f"{type(error).__name__}: {error}"[-500:])
    os.kill(os.getpid(), signal.SIGTERM)


def profile(seconds: float, bundle: Bundle) -> dict[str, Any]:
    """Traces for some seconds: `load_trace.Busy`, and when the trace had ended.

    The devices do nothing where it begins and ends: on GPUs a profiler that finds a CUDA graph
    under way breaks it. While it runs XLA launches kernels one by one, without graphs.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow every call down
    with tempfile.TemporaryDirectory() as folder:
        with bundle.paused():
            jax.profiler.start_trace(folder, profiler_options=options)
        with jax.profiler.TraceAnnotation(STEP):
            time.sleep(seconds)
        ended = time.perf_counter()
        with bundle.paused():
            jax.profiler.stop_trace()
        # To read it takes seconds, in which this process could not send tokens.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            read = process.submit(read_busy, folder, len(bundle.devices)).result()
    return {**read._asdict(), "ended": ended}


def main() -> None:
    """Serves until a signal comes."""
    given = argparse.Namespace(**json.loads(sys.argv[1]))
    made: queue.SimpleQueue[Bundle] = queue.SimpleQueue()
    threading.Thread(target=obey, args=(made,), name="commands", daemon=True).start()
    options = ServerOptions(max_waiting=given.max_waiting, token_budget=given.token_budget)
    with ending_on_interrupt(), one_message(ConfigError, *USER_ERRORS):
        serve(
            lambda: load(given, made),
            port=given.port,
            options=options,
            log_level="warning",
            apart=True,
        )


if __name__ == "__main__":
    main()
