import json

import pytest

from qtool.core.lazy import load
from qtool.errors import UsageError


def test_what_is_named_is_loaded() -> None:
    assert load("json:dumps", extra="onnx") is json.dumps


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    with pytest.raises(UsageError, match=r"needs the package no_such_package.*pip install -e '\.\[onnx\]'"):
        load("no_such_package.part:name", extra="onnx")
