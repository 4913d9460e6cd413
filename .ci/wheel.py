"""What users of the wheel do: `.ci/wheel` runs this in an environment that has nothing else.

`wheel.py serve` serves a StableHLO module, which needs the extra `serve` alone. `wheel.py train`
trains a model of the user's, and a Llama that it then exports and serves. Both run in a folder of
their own, in which packages of the user's are called like folders of ours.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["SPMD_CACHE_DIR"] = "none"

import jax
import jax.numpy as jnp
import numpy as np

import spmd

MESH = "--mesh=data=2,model=2"


def run(command: str, *flags: str) -> None:
    """Runs one of our commands; it has to end well."""
    print(f"$ {command} {' '.join(flags)}", flush=True)
    subprocess.run([Path(sys.executable).with_name(command), *flags], check=True)


def answer(bundle: str, path: str, request: object) -> dict[str, object]:
    """Serves a bundle, sends one request, and stops the server, which has to end well."""
    command = [str(Path(sys.executable).with_name("spmd-serve")), bundle, MESH, "--port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = ""
        for line in server.stderr:
            print(line, end="", flush=True)
            url = line.split("listening on ")[1].split(",")[0] if "listening on " in line else url
            if "ready:" in line:
                break
        else:
            raise RuntimeError(f"spmd-serve ended with {server.wait()}")
        head = {"Content-Type": "application/json"}
        sent = urllib.request.Request(url + path, json.dumps(request).encode(), head)
        with urllib.request.urlopen(sent, timeout=60) as got:
            found: dict[str, object] = json.load(got)
        server.terminate()
        server.communicate()
    assert server.returncode == 0, server.returncode
    print(path, found, flush=True)
    return found


def serve() -> None:
    """Serves a function, as another framework would hand it over."""
    from spmd.serving.bundle.wrap import wrap_stablehlo

    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    module = jax.jit(lambda w, x: x @ w).lower(w, jnp.ones((2, 4))).as_text()
    wrap_stablehlo("linear", module, weights={"w": w}, arg_names=("w", "x"), result_names=("y",))
    given = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [1.0] * 8}
    found = answer("linear", "/v2/models/bundle/infer", {"inputs": [given]})
    assert found["outputs"][0]["data"] == [18.0, 22.0, 26.0] * 2  # type: ignore[index]
    try:
        run("spmd-train-llama")  # its extra is not here yet
    except subprocess.CalledProcessError as error:
        assert error.returncode == 1, error


def train() -> None:
    """Trains a model of the user's in two halves; trains a Llama so, exports it and serves it."""
    import optax

    from spmd.models.training.trainer import Trainer, TrainerOptions

    def data(step: int) -> dict[str, np.ndarray]:
        x = np.random.default_rng(step).standard_normal((16, 8), np.float32)
        return {"x": x, "y": np.roll(x, 1, axis=1)}

    for steps in (2, 4):
        outcome = Trainer(
            lambda key: {"w": jax.random.normal(key, (8, 8)) / 3},
            lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2),
            {"w": ("rows", None)},
            data,
            mesh=spmd.make_mesh(rows=4),
            batch_marks={"*": ("rows",)},
            optimizer=optax.adamw(1e-2),
            options=TrainerOptions(steps=steps, run_dir="runs/own", save_every=2),
        ).run()
        assert outcome.first and outcome.first["step"] == steps - 1  # the second half goes on

    Path("text.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    flags = (
        "--model=tiny --layers=1 --seq_len=16 --global_batch=4 --eval_batches=0 --sample_tokens=0"
    )
    for steps in (2, 4):
        more = [f"--steps={steps}", "--save_every=2", "--resume=auto", "--run_dir=runs/llama"]
        run("spmd-train-llama", MESH, "--data=text.txt", *flags.split(), *more)
    sizes = "--dtype=float32 --slots=2 --groups=1 --max_length=32 --rows=2,16 --length=32 --page=16"
    run("spmd-export-llama", "--run_dir=runs/llama", "--out=llama", *sizes.split())
    asked = {"model": "llama", "prompt": "one two", "max_tokens": 4, "temperature": 0}
    found = answer("llama", "/v1/completions", asked)
    assert found["usage"]["completion_tokens"] == 4  # type: ignore[index]


if __name__ == "__main__":
    for folder in ("models", "serving", "scripts"):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "__init__.py").write_text("raise ImportError('a package of the user')\n")
    sys.path.insert(0, os.getcwd())  # as for a program that lies here
    {"serve": serve, "train": train}[sys.argv[1]]()
