import re

import pytest

from spmd.models.training.paths import StorePath
from tests.stores import serving_gs, serving_s3


@pytest.fixture(scope="session")
def s3_bucket():
    with serving_s3() as bucket:
        yield bucket


@pytest.fixture(scope="session")
def gs_bucket():
    with serving_gs() as bucket:
        yield bucket


def own_folder(bucket, request):
    return bucket / re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def s3(s3_bucket, request):
    """An empty folder of an S3 bucket."""
    return own_folder(s3_bucket, request)


@pytest.fixture(params=["s3", "gs"])
def store(request):
    """An empty folder of a bucket, of each kind of store."""
    return own_folder(request.getfixturevalue(f"{request.param}_bucket"), request)


@pytest.fixture
def asked(monkeypatch):
    """(name, end of the range if there is one, bytes) of what is read of a store."""
    found = []
    read = StorePath.read_bytes

    def recording(path, start=None, stop=None):
        content = read(path, start, stop)
        found.append((path.name, stop, len(content)))
        return content

    monkeypatch.setattr(StorePath, "read_bytes", recording)
    return found
