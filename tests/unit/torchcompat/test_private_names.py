"""Private names of torch: present, with the behaviour that headrace relies on, and used in one module only.

`make test-torch TORCH=2.9.1` runs the tests with another release of torch. After a failure,
`_torchcompat/private.py` has to follow that release.
"""

import ast
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from torch.utils import data

import headrace as hr
from headrace._torchcompat import private

CHECKED = ("2.6.0", "2.15.0")  # the oldest that is supported, and the newest
SOURCE = Path(hr.__file__).parent
# Attributes of torch's DataLoader that headrace's reads: whether a plan is a batch, the sampler
# that gives the plans, and the length that `len()` of a stream's loader has reported; and the
# method that makes the iterator.
ATTRIBUTES = (
    "_auto_collation",
    "_index_sampler",
    "_IterableDataset_len_called",
    "_get_iterator",
)

# As proposed in https://github.com/pytorch/pytorch/pull/93841
TWO_PARAMETERS = """
from typing import TypeVar
from torch.utils.data import DataLoader

DataLoader.__parameters__ = (TypeVar("Sample"), TypeVar("Batch"))
import headrace as hr

print(list(hr.DataLoader[int]([1, 2], batch_size=None)), isinstance(hr.DataLoader([]), DataLoader))
"""


def test_supported_versions_of_torch_begin_with_the_oldest_that_was_checked():
    (torchs,) = (
        requirement.specifier
        for requirement in map(Requirement, importlib.metadata.requires("headrace"))
        if requirement.name == "torch" and requirement.marker is None
    )
    assert all(version in torchs for version in CHECKED)
    assert "2.5.1" not in torchs
    assert "3.0" not in torchs, "a new major version may rename anything"


def test_private_names_of_torch_are_used_in_one_module_only():
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "_torchcompat":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.search(
                r"^torch\b.*\._", node.module or ""
            ):
                found.append((path.name, node.module))
            if isinstance(node, ast.Attribute) and re.match(
                r"torch\b.*\._[a-zA-Z]", ast.unparse(node)
            ):
                found.append((path.name, ast.unparse(node)))
    assert found == []


def test_names_exist_and_do_what_they_say():
    assert [
        name for name in ATTRIBUTES if not hasattr(data.DataLoader([1, 2]), name)
    ] == []
    assert next(iter(inspect.signature(private.pin_memory).parameters)) == "data"
    assert private.pin_memory("text") == "text"
    assert str(KeyError(private.KeyErrorMessage("a\nb"))) == "a\nb"


def test_data_loader_of_torch_may_have_two_type_parameters():
    environment = {
        **os.environ,
        "PYTHONPATH": f"{SOURCE.parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-c", TWO_PARAMETERS]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == ("[1, 2] True\n", 0), ended.stderr
