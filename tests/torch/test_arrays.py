"""Tensors become arrays and come back as they were, and share no memory with them."""

import pytest

pytest.importorskip("spmd.torch", reason="needs torch and torchax: .[torch]", exc_type=ImportError)

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.mesh.spec import jax_mesh
from spmd.torch.arrays import array_of, tensor_of

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32,
    torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [(), ("data", "model")], ids=["whole", "split"])
def test_there_and_back(mesh, dtype, spec):
    tensor = torch.arange(32).reshape(8, 4).t().contiguous().t().to(dtype)  # columns first
    sharding = NamedSharding(jax_mesh(mesh), PartitionSpec(*spec))
    found = tensor_of(jax.device_put(array_of(tensor, "it"), sharding))
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64))


def test_memory_is_not_shared():
    tensor = torch.zeros(1024)
    array = jax.numpy.asarray(array_of(tensor, "it"))
    back = tensor_of(array)
    tensor.fill_(1)
    back.fill_(2)
    assert float(array.sum()) == 0


def test_of_64_bits_integers_have_to_fit_into_32_and_floats_are_refused():
    assert array_of(torch.tensor([2**31 - 1]), "it").dtype == "int32"
    with pytest.raises(spmd.ArgumentError, match="do not fit into 32 bits"):
        array_of(torch.tensor([2**31]), "it")
    with pytest.raises(spmd.ArgumentError, match="computes in 32 bits"):
        array_of(torch.ones(2, dtype=torch.float64), "it")
