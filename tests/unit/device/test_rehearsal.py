"""Checks of the tests and the benchmark for a GPU that need no GPU."""

import ast
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import headrace as hr
from tests.gpu.rows import KEPT, Rows, check_every_byte, check_layouts, layouts

ROOT = Path(__file__).parents[3]


def run(streams):
    streams.sides[-1].run()
    streams.consumer.run()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=str)
def test_all_bytes_of_all_dtypes_are_compared_and_a_single_wrong_bit_is_found(
    streams, options
):
    taken = []

    def done(batch):
        run(streams)
        taken.append(batch)
        return batch

    def flipped(batch):
        if len(taken) == 2 * KEPT + 4:
            batch["torch.bfloat16"].view(torch.uint8)[0, -1] ^= 1
        return batch

    with hr.DataLoader(Rows(2 * KEPT + 1), device="there", **options) as loader:
        assert check_every_byte(loader, done) == 2 * KEPT + 1
        with pytest.raises(AssertionError, match="batch 2 is not what was sent"):
            check_every_byte(loader, lambda batch: flipped(done(batch)))


def test_layouts_and_containers_arrive_as_they_were_sent(streams):
    sent = layouts()
    with hr.DataLoader(
        Rows(1), collate_fn=lambda samples: sent, num_workers=1, device="there"
    ) as loader:
        (got,) = loader
    run(streams)
    check_layouts(got, sent, lambda tensor: torch.empty_like(tensor).copy_(tensor))


@pytest.mark.parametrize("folder", ["tests/gpu", "benchmarks", "src/headrace/_device"])
def test_names_of_torch_in_code_for_a_gpu_exist(folder):
    named = set()
    for file in ROOT.glob(f"{folder}/{'gpu_' * (folder == 'benchmarks')}*.py"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        named |= {
            name
            for node in nodes
            if (name := ast.unparse(node)).startswith("torch.") and is_dotted(node)
        }
    assert named
    for name in named:
        attrgetter(name.removeprefix("torch."))(torch)


def is_dotted(node):
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and is_dotted(node.value)
    )
