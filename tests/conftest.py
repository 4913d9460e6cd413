"""Eight CPU devices, golden texts and hypothesis profiles for every test.

Options:
    --update-golden: rewrite the files under tests/golden with what the tests produce now.
    --hypothesis-profile long: search more examples (the default profile is `quick`).

Environment:
    SPMD_TEST_PLATFORM: run on this platform (a value for JAX_PLATFORMS) instead of the CPU.
"""

import difflib
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

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


LONG = (
    "test_resume_test.py", "test_against_shardy.py", "test_served_model.py",
    "test_rules_execute.py", "test_processes.py", "test_training_job.py",
    "test_trainer.py", "test_decode.py", "test_corpus.py", "test_merge.py", "test_manual.py",
    "test_llama_step.py", "test_examples.py", "test_docs.py", "test_uneven.py",
    "test_language_models.py", "test_families.py", "test_train_llama.py",
)  # fmt: skip
"""Files that take half a minute or more: begun last, one of them would run alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """What was imported lives to the end: looking for cycles in it again and again costs time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


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
    """The first eight jax devices."""
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
