"""Object stores for tests: servers of this process that speak S3's and Google's protocols."""

import contextlib
import importlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from spmd.models.training.paths import StorePath, file_system

BUCKET = "tests"


@contextlib.contextmanager
def serving_s3() -> Iterator[StorePath]:
    """A bucket of a server in this process; tests are skipped where there is none."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server", reason="needs moto[server]")
    started = server.ThreadedMotoServer(port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with environment(variables):
        bucket = StorePath(f"s3://{BUCKET}")
        file_system("s3").mkdir(BUCKET)
        yield bucket
    started.stop()


@contextlib.contextmanager
def serving_gs() -> Iterator[StorePath]:
    """As `serving_s3`, for Google Cloud Storage."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when it is imported
    pytest.importorskip("gcsfs")
    server = pytest.importorskip("gcp_storage_emulator.server")
    _add_generations()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = server.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    started.start()
    where = f"http://127.0.0.1:{port}"
    with environment({"STORAGE_EMULATOR_HOST": where, "TENSORSTORE_GCS_HTTP_URL": where}):
        yield StorePath(f"gs://{BUCKET}")
    started.stop()


def _add_generations() -> None:
    """The emulator leaves out a header with which Google's service answers every download."""
    server = importlib.import_module("gcp_storage_emulator.server")
    objects: Any = importlib.import_module("gcp_storage_emulator.handlers.objects")
    download = objects.download

    def with_generation(request, response, storage, *args, **kwargs):
        download(request, response, storage, *args, **kwargs)
        with contextlib.suppress(Exception):
            place = (request.params["bucket_name"], request.params["object_id"])
            response["x-goog-generation"] = storage.get_file_obj(*place)["generation"]

    objects.download = with_generation
    for _, handlers in server.HANDLERS:
        for method, handler in handlers.items():
            if handler is download:
                handlers[method] = with_generation


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables that are set inside, for this process and those that it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    file_system.cache_clear()
    try:
        yield
    finally:
        file_system.cache_clear()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
