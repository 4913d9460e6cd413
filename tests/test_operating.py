"""docs/kubernetes.yaml and docs/operating.md against the code: paths, ports, flags, metrics."""

import dataclasses
import json
import logging
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from spmd.scripts.flags.reach import KEYS
from spmd.scripts.serve_bundle import make_parser, options
from spmd.serving.engine.actions import Counts
from spmd.serving.engine.core import Core
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.records import EngineState
from spmd.serving.http import app, logs
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.logs import HttpExchange
from spmd.serving.http.metrics import Metrics
from spmd.serving.http.server import CLOSING_SECONDS, IDLE_SECONDS
from spmd.serving.http.traffic import RequestMetrics
from tests.serving.engine.fake_backend import FakeBackend
from tests.test_docker import of_kind

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/kubernetes.yaml").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/operating.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(TEXT)}


@pytest.fixture(scope="module")
def pod(objects: dict[str, Any]) -> Any:
    return objects["Deployment"]["spec"]["template"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    (only,) = pod["spec"]["containers"]
    return only


def test_the_service_finds_the_pods(objects: dict[str, Any], pod: Any, container: Any) -> None:
    deployment, service = objects["Deployment"]["spec"], objects["Service"]["spec"]
    labels = pod["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= names


def test_flags_are_those_of_the_server(container: Any) -> None:
    """Those in use, and those that comments offer."""
    assert make_parser().parse_args(container["args"]).log_format == "json"
    offered = re.findall(r"# With [^:]+: +(--\w+), (\S+)", TEXT)
    assert len(offered) == 2
    for flag, value in offered:
        make_parser().parse_args([*container["args"], flag, value.strip('"')])


def test_the_mesh_takes_the_gpus_that_are_asked_for(container: Any) -> None:
    mesh = make_parser().parse_args(container["args"]).mesh
    assert container["resources"]["limits"]["nvidia.com/gpu"] == math.prod(mesh.values())


def test_ports_probes_and_the_time_of_the_start(pod: Any, container: Any) -> None:
    (port,) = (port["containerPort"] for port in container["ports"])
    given = make_parser().parse_args(container["args"])
    assert of_kind("EXPOSE") == [str(port)] and given.port == port
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    paths = {route.path: route.endpoint for route in app.PROBES}
    wanted = {
        "startupProbe": app.started, "livenessProbe": app.live, "readinessProbe": app.ready
    }  # fmt: skip
    for name, endpoint in wanted.items():
        asked = container[name]["httpGet"]
        assert paths[asked["path"]] is endpoint
        assert asked["port"] == container["ports"][0]["name"]
    (health,) = of_kind("HEALTHCHECK")
    assert f"127.0.0.1:{port}/health" in health
    minutes = re.search(r"--start-period=(\d+)m", health)
    probe = container["startupProbe"]
    assert minutes
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 60 * int(minutes[1])


def test_requests_may_end_before_the_process_is_killed(pod: Any, container: Any) -> None:
    drain = options(make_parser().parse_args(container["args"])).drain_seconds
    command, sleep = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    readiness = container["readinessProbe"]
    assert int(sleep) >= readiness["periodSeconds"] * readiness["failureThreshold"]
    stop, _ = Engine.stop.__defaults__ or ()  # seconds for the threads
    traces = 10  # the exporter's own time limit
    least = int(sleep) + drain + stop + CLOSING_SECONDS + traces
    assert pod["spec"]["terminationGracePeriodSeconds"] >= least


def test_names_are_those_of_the_image_and_the_server(pod: Any, container: Any) -> None:
    assert KEYS in TEXT
    assert pod["spec"]["securityContext"]["runAsUser"] == int(of_kind("USER")[0])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert container["args"][0].startswith(mounts["bundles"] + "/")
    assert mounts["cache"] == "/home/spmd/.cache"
    assert "scripts/serve --host 0.0.0.0" in TEXT
    assert of_kind("ENTRYPOINT") == ['["scripts/serve", "--host", "0.0.0.0"]']


def test_flags_that_the_page_names() -> None:
    help_text = make_parser().format_help()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", PAGE))
    ours = {flag for flag in named if re.search(rf"{flag}\b", help_text)}
    files = (ROOT / "scripts" / "launch_job.py", *(ROOT / "scripts" / "jobs").glob("*.py"))
    launching = "".join(file.read_text(encoding="utf-8") for file in files)
    others = {flag for flag in named - ours if f'"{flag}"' not in launching}
    assert others == {"--stop-timeout"}  # docker's
    reached = {f"--{field.name}" for field in dataclasses.fields(HttpOptions)}
    assert reached | {"--log_format", "--drain_seconds"} <= ours


def test_metrics_that_are_named() -> None:
    backend = FakeBackend()
    state = EngineState(0, 0, pages=1, held=0, cached=0, counts=Counts())
    requests = RequestMetrics("fake", lambda: (0, 0))
    Metrics(requests, Core(backend), lambda: state)
    known = generate_latest(requests.registry).decode()
    named = set(re.findall(r"(?:vllm|spmd):\w+", PAGE + TEXT))
    assert len(named) > 10
    assert [name for name in named if not re.search(rf"(?m)^(# TYPE )?{name}[{{ ]", known)] == []


def test_times_and_probes_that_the_page_names() -> None:
    assert f"{IDLE_SECONDS} seconds" in PAGE
    assert f"{ServerOptions().drain_seconds:g} seconds" in PAGE
    assert f"{ServerOptions().stall_seconds:g} seconds" in PAGE
    assert {f"/{path}" for path in re.findall(r"(?m)^\| `/(\w+)`", PAGE)} == {
        route.path for route in app.PROBES
    }


def test_fields_of_the_log_that_the_page_names() -> None:
    """The example is a line of the log: its fields are those that the code writes."""
    shown = json.loads(re.findall(r"(?ms)^```json\n(.*?)^```", PAGE)[0])
    stream: Any = types.SimpleNamespace(records=[])
    exchange = HttpExchange("abc", "POST", "/v1/completions", "127.0.0.1", 200, stream=stream)
    record = logging.makeLogRecord({logs.FIELDS: exchange.fields() | {"trace_id": ""}})
    assert set(shown) == set(json.loads(logs.JsonFormatter().format(record)))
