"""Meshes and specs as flags spell them."""

from argparse import ArgumentTypeError

import pytest

from spmd.cli.specs import mesh_axes, parse_named_specs
from spmd.errors import ArgumentError

NAMES = ("params/w", "x")


def test_specs_by_number_name_and_pattern_one_for_each_argument():
    given = ["1=data,None", "params/*=...,data+model", "0=-"]
    assert parse_named_specs("arg_spec", given, NAMES) == {
        "x": (("data",), None),
        "params/*": (..., ("data", "model")),
        "params/w": (None,),
    }
    assert parse_named_specs("arg_spec", ["0=", "x=data,"], NAMES) == {
        "params/w": (),
        "x": (("data",),),
    }
    with pytest.raises(ArgumentError, match="--arg_spec: 'x' has two specs"):
        parse_named_specs("arg_spec", ["1=data", "x=model"], NAMES)


@pytest.mark.parametrize("wrong", ["data", "=data", "2=data", "0=,model", "0=data,,model"])
def test_specs_that_cannot_be_read(wrong: str):
    with pytest.raises(ArgumentError, match="--arg_spec: "):
        parse_named_specs("arg_spec", [wrong], NAMES)


def test_meshes():
    assert mesh_axes("data=4, model=2") == {"data": 4, "model": 2}
    for wrong in ("data", "data=4,data=2", "=3", "data=x", "data=0", ""):
        with pytest.raises(ArgumentTypeError):
            mesh_axes(wrong)
