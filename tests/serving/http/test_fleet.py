"""Several models behind one port: passed on, listed, counted, and put in each other's place."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from spmd.serving.errors import ServingError
from spmd.serving.http import fleet
from spmd.serving.http.fleet import Fleet, FleetServer, joined, read_models
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.server import listen
from tests.serving.http.live import get, post
from tests.waiting import PATIENCE, wait_until

MODELS = {"a": {"bundle": "x", "memory_share": 0.4}, "b": {"bundle": "y", "memory_share": 0.5}}
KEY = {"Authorization": "Bearer secret"}

MEMBER = """
import sys, yaml
from pathlib import Path
from spmd.models.training.data.tokenizer import ByteTokenizer
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.server import serve
from tests.serving.engine.fake_backend import FakeBackend
from tests.waiting import wait_until

bundle, settings, name, host = (word.partition("=")[2] or word for word in sys.argv[1:5])
if yaml.safe_load(Path(settings).read_text()).get("broken"):
    sys.exit("error: the bundle is broken")
backend = FakeBackend()
gate = Path(bundle)
backend.gate.wait = lambda: wait_until(gate.exists)
options = ServerOptions(api_keys=("secret",), drain_seconds=60)
serve(lambda: Loaded(name, backend, ByteTokenizer()), host, options=options,
      http=HttpOptions(forwarded_allow_ips=("*",)), apart=True)
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write lines such as llama"),
        ("a: {}", "a needs its folder"),
        ("a b: {bundle: x}", "names are of letters"),
        ("a: {bundle: x}\nb: {bundle: y}", "a needs memory_share.*memory_share: 0.45}"),
        ("a: [", "while parsing"),
    ],
)
def test_files_that_say_too_little(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "models.yaml").write_text(text)
    with pytest.raises(ServingError, match=message):
        read_models(tmp_path / "models.yaml")


def test_metrics_of_a_family_are_together() -> None:
    one = '# HELP n of things\n# TYPE n counter\nn_total{k="v"} 1.0\n# TYPE m gauge\nm 2.0\n'
    assert joined([("a", one), ("b", one), ("", "own 3\n")]).splitlines() == [
        "# HELP n of things",
        "# TYPE n counter",
        'n_total{k="v",process="a"} 1.0',
        'n_total{k="v",process="b"} 1.0',
        "# TYPE m gauge",
        'm{process="a"} 2.0',
        'm{process="b"} 2.0',
        "own{} 3",
    ]


@pytest.fixture
def fleet_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fleet, str]]:
    """Of a fleet of two fakes, whose steps run once the files `x` and `y` are there."""
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(fleet, "COMMAND", (sys.executable, "-c", MEMBER))
    write(tmp_path, MODELS)
    made = Fleet(tmp_path / "models.yaml", ServerOptions(api_keys=("secret",), drain_seconds=60))
    server = FleetServer(made, HttpOptions(), "critical")
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = "http://127.0.0.1:{}".format(*listener.getsockname()[1:])
    wait_until(lambda: get(f"{url}/health").status_code == 200)
    yield made, url
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive()


def write(folder: Path, models: dict[str, Any]) -> None:
    said = {
        name: {**about, "bundle": str(folder / about["bundle"])} for name, about in models.items()
    }
    (folder / "models.yaml").write_text(yaml.safe_dump(said))


def lines_of(url: str, model: str, found: list[str]) -> None:
    body = {"model": model, "prompt": "hello", "max_tokens": 12, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=KEY, timeout=PATIENCE
    ) as x:
        found.extend(x.iter_lines())


@pytest.mark.thorough
def test_models_come_and_go(fleet_at: tuple[Fleet, str], tmp_path: Path) -> None:
    _, url = fleet_at
    client = OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    assert [one.id for one in client.models.list()] == ["a", "b"]
    for name in "yx":
        (tmp_path / name).touch()

    def text(model: str) -> str:
        told = client.completions.create(model=model, prompt="hello", max_tokens=8, seed=1)
        return told.choices[0].text

    texts = {model: text(model) for model in "ab"}
    assert all(texts.values())
    for status, body in ((404, {"model": "c", "prompt": "x"}), (400, {"prompt": "x"})):
        answer = post(f"{url}/v1/completions", json=body, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "model")
    assert post(f"{url}/v1/completions", json={"model": "a"}).status_code == 401
    assert post(f"{url}/v1/completions", content="{", headers=KEY).status_code == 400
    assert get(f"{url}/v2/models/b", headers=KEY).json()["name"] == "b"
    assert get(f"{url}/models/a/v1/models/a", headers=KEY).json()["id"] == "a"
    told = get(f"{url}/metrics").text
    assert 'model_name="a",process="a"' in told and 'model_name="b",process="b"' in told
    assert told.count("# TYPE vllm:num_requests_running ") == 1

    # A new version takes the place of the old one, which ends what runs there.
    (tmp_path / "x").unlink()
    found = list[str]()
    asking = threading.Thread(target=lines_of, args=(url, "a", found))
    asking.start()
    wait_until(
        lambda: 'num_requests_running{model_name="a",process="a"} 1.0' in get(f"{url}/metrics").text
    )
    write(tmp_path, {**MODELS, "a": {**MODELS["a"], "bundle": "y"}})
    triton = InferenceServerClient(url.removeprefix("http://"))
    triton.load_model("a", headers=KEY)
    assert text("a") == texts["a"]
    assert not found
    (tmp_path / "x").touch()
    asking.join(PATIENCE)
    assert found[-2:] == ["data: [DONE]", ""] and any('"length"' in line for line in found)

    # One that is broken changes nothing.
    write(tmp_path, {**MODELS, "b": {**MODELS["b"], "broken": True}})
    with pytest.raises(InferenceServerException, match="the bundle is broken"):
        triton.load_model("b", headers=KEY)
    assert text("b") == texts["b"]
    write(tmp_path, MODELS)
    triton.unload_model("b", headers=KEY)
    assert [one["name"] for one in triton.get_model_repository_index(headers=KEY)] == ["a"]
    gone = post(f"{url}/v1/completions", json={"model": "b", "prompt": ""}, headers=KEY)
    assert "there is no 'b' here" in gone.text
    assert get(f"{url}/health").status_code == 200


@pytest.mark.thorough
def test_processes_that_die_and_clients_that_leave(
    fleet_at: tuple[Fleet, str], tmp_path: Path
) -> None:
    made, url = fleet_at
    running = 'num_requests_running{model_name="a",process="a"} '
    body = {"model": "a", "prompt": "hello", "max_tokens": 12, "stream": True}
    address = f"{url}/v1/completions"
    with httpx.stream("POST", address, json=body, headers=KEY, timeout=PATIENCE):
        wait_until(lambda: f"{running}1.0" in get(f"{url}/metrics").text)
    (tmp_path / "x").touch()
    wait_until(lambda: f"{running}0.0" in get(f"{url}/metrics").text)
    wait_until(lambda: made.members["a"].busy == 0)
    write(tmp_path, {**MODELS, "a": {**MODELS["a"], "broken": True}})  # it cannot come back yet
    process = made.members["a"]._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: "a" in made.lacking)
    assert post(address, json=body, headers=KEY).status_code == 503
    write(tmp_path, MODELS)
    wait_until(lambda: get(f"{url}/health").status_code == 200)
    assert post(address, json=body, headers=KEY).text.endswith("data: [DONE]\n\n")
