"""Eight CPU devices, golden texts and hypothesis profiles for every test.

Options:
    --update-golden: rewrite the files under tests/golden with what the tests produce now.
    --hypothesis-profile long: search more examples (the default profile is `quick`).

Environment:
    SPMD_TEST_PLATFORM: run on this platform (a value for JAX_PLATFORMS) instead of the CPU.
"""

import atexit
import difflib
import gc
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

GOLDEN_DIR = Path(__file__).parent / "golden"
DEVICE_COUNT = 8

# jax reads its environment when it is imported, so all of this has to come first.
XLA_FLAGS = {
    "--xla_force_host_platform_device_count": DEVICE_COUNT,
    # Eight devices share a few cores: arriving late at a collective is no reason to abort.
    "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
    # Tests compile much and run little.
    "--xla_backend_optimization_level": 0,
    "--xla_llvm_disable_expensive_passes": "true",
    # By default a program's kernels are compiled in up to 32 modules, for as many threads.
    "--xla_cpu_parallel_codegen_split_count": 1,
    # Three quarters of the time that a training step takes to compile go into one MLIR pipeline
    # for each fused kernel; XLA's older emitters compute the same.
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters=true",
}


def _prepare_environment() -> None:
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before tests/conftest.py could set XLA_FLAGS")
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = {flag.partition("=")[0] for flag in flags}
    flags += [f"{name}={value}" for name, value in XLA_FLAGS.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    # Tests plan anew, and write nothing into the folders of whoever runs them.
    os.environ["SPMD_CACHE_DIR"] = "none"
    os.environ["JAX_PLATFORMS"] = os.environ.get("SPMD_TEST_PLATFORM", "cpu")
    # PyTorch's threads wait for each other at every op, by turning in circles: with a busy machine
    # a step of a tiny model takes a second instead of a few milliseconds.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Several processes share a GPU: the first one must not take three quarters of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


_prepare_environment()

# `quick` repeats itself exactly: a red run means a change, never bad luck.
_RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", _RELAXED, max_examples=20, derandomize=True)
settings.register_profile("long", _RELAXED, max_examples=500)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the golden files with what the tests produce now",
    )


BUDGET, MOST = 10.0, 60.0
"""Seconds of processor time that a test should take, with its fixtures and its processes, and that
it may take. How loaded the machine is does not count."""

STARTED = pytest.StashKey[float]()


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def _has_budget(item: pytest.Item) -> bool:
    is_quick = item.config.getoption("--hypothesis-profile") in (None, "quick")
    excused = any(item.get_closest_marker(name) for name in ("heavy", "slow"))
    return is_quick and not excused and os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[STARTED] = _processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Code in the `fix:` of an error that a test meets has to work (`tests/fixes.py`)."""
    errors: Any = sys.modules.get("spmd.errors")
    if errors is not None and not hasattr(errors, "is_checked"):
        errors.is_checked, render = True, errors.SpmdError.render

        def checked(error: Any) -> str:
            if "(" in (error.fix or ""):
                from tests.fixes import problems

                found = problems(error.fix)
                assert not found, f"the fix of an error does not work: {found}"
            return str(render(error))

        errors.SpmdError.render = checked
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Holds a test against the budget. `@pytest.mark.slow(reason)` says why one is excused."""
    result = yield
    took = _processor_seconds() - item.stash[STARTED]
    item.user_properties.append(("processor_s", took))
    if took > MOST and _has_budget(item):
        pytest.fail(
            f"it took {took:.1f} s of processor time, of {MOST:.0f}: make it smaller, share what "
            "it compiles with its neighbours, or mark it `slow` with a reason",
            pytrace=False,
        )
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names the slowest tests, by processor time."""
    reports = [r for kind in terminalreporter.stats.values() for r in kind]
    took = {
        report.nodeid: dict(report.user_properties).get("processor_s", 0.0)
        for report in reports
        if getattr(report, "when", "") == "teardown"
    }
    slowest = [i for i in sorted(took, key=lambda i: -took[i]) if took[i] > BUDGET]
    if slowest:
        terminalreporter.section(
            f"more than {BUDGET:.0f} s, of {sum(took.values()):.0f} s of processor time"
        )
    for nodeid in slowest:
        terminalreporter.line(f"{took[nodeid]:6.1f} s  {nodeid}")


LONG = (
    "test_processes.py", "test_rules_execute.py", "test_corpus.py", "test_resume_test.py",
    "test_examples.py", "test_docs.py", "test_experts.py", "test_placements.py", "test_fuzz.py",
    "test_limit.py", "test_reasons.py", "test_custom_calls.py", "test_open_arguments.py",
    "test_watchdog.py", "test_serve_bundle.py", "test_ragged_triton.py",
)  # fmt: skip
"""Files that take long, however small they are: those first that wait for processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: one that is begun last would run alone at the end."""
    rank = {name: number for number, name in enumerate(LONG)}
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda i: (rank.get(i.path.name, len(LONG)), -sizes[i.path], str(i.path)))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Workers begin with other folders: each reads what the others have compiled to bytecode."""
    report = yield
    if collector.path == GOLDEN_DIR.parent and hasattr(collector.config, "workerinput"):
        number = int(collector.config.workerinput["workerid"].removeprefix("gw"))
        first = len(report.result) * number // collector.config.workerinput["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_finish() -> None:
    """What was imported lives to the end: looking for cycles in it again and again costs time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)
    _reuse_contexts()


def _reuse_contexts() -> None:
    """Contexts of MLIR: a run makes 7,500 of them, at 6 ms each."""
    import jax._src.interpreters.mlir as private
    from jax.interpreters import mlir

    if hasattr(private, "_thread_local_context"):
        return  # from jax 0.11 on a thread uses a context for several modules anyhow
    make, mine = private.make_ir_context, threading.local()

    def make_ir_context() -> Any:
        uses = getattr(mine, "uses", 0)
        if uses % 10 == 0:
            mine.context = make()
        mine.uses = uses + 1
        return mine.context

    private.make_ir_context = mlir.make_ir_context = make_ir_context


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends a worker at once: to free what jax holds, object by object, would take seconds."""
    if hasattr(session.config, "workerinput"):
        atexit.register(os._exit, 0)


GREEDY = (
    "benchmarks", "examples", "ir", "launch", "lowering", "models", "ops", "propagation", "scripts",
    "serving", "torch",
)  # fmt: skip
"""Folders whose tests are about what programs compute, whatever their plans."""

NEARBY = ("planning", "test_docs.py", "test_examples.py")
"""Where plans near the best one are tried, too, as users have it. Tests elsewhere do without."""


@pytest.fixture(scope="module", autouse=True)
def _greedy_plans(request: pytest.FixtureRequest) -> Iterator[None]:
    """There programs are planned greedily, but for modules marked `exact_plans`."""
    from tests.greedy import plan_all_greedily

    folder = request.path.relative_to(GOLDEN_DIR.parent).parts[0]
    is_exact = request.node.get_closest_marker("exact_plans") is not None
    with pytest.MonkeyPatch.context() as patch:
        if folder in GREEDY and not is_exact:
            plan_all_greedily(patch)
        elif folder not in NEARBY:
            patch.setattr("spmd.planning.exact.MOST_TRIES", 0)
        yield


@pytest.fixture
def exact_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: `@pytest.mark.usefixtures("exact_plans")`."""
    from spmd.planning.exact import plan_exactly

    monkeypatch.setattr("spmd.compiler.plan_exactly", plan_exactly)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Returns `golden(name, text)`, which compares text with tests/golden/<name>.txt."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = GOLDEN_DIR / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        shown = f"tests/golden/{name}.txt"
        if not path.exists():
            pytest.fail(
                f"{shown} does not exist; run this test with --update-golden to write it, "
                f"then read it. The text is:\n\n{text}",
                pytrace=False,
            )
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(keepends=True),
                text.splitlines(keepends=True),
                fromfile=shown,
                tofile="now",
            )
            pytest.fail(
                f"{shown} differs; if the change is meant, run this test with --update-golden "
                f"and review the diff.\n\n{''.join(diff)}",
                pytrace=False,
            )

    return check


@pytest.fixture(scope="session")
def devices8():
    import jax

    devices = jax.devices()
    if len(devices) < DEVICE_COUNT:
        pytest.fail(
            f"the tests need {DEVICE_COUNT} devices and jax has {len(devices)}: {devices}. "
            f"XLA_FLAGS is {os.environ['XLA_FLAGS']!r}; was jax imported before tests/conftest.py?",
            pytrace=False,
        )
    return devices[:DEVICE_COUNT]


@pytest.fixture(scope="session")
def mesh(devices8):
    """The mesh of tests for which any will do."""
    import spmd

    return spmd.make_mesh(data=4, model=2, devices=devices8)
