"""Changes of Python 3.14 that break libraries, by emulation."""

import inspect
import os
import subprocess
import sys
import types

import pytest

import headrace as hr
from tests.documents import ROOT

# From Python 3.14 on this is the default on Linux; the program sets nothing.
FORKSERVER = """
import multiprocessing.context as c
c._default_context._default_context = c._concrete_contexts["forkserver"]
"""
ASYNC = """
import headrace as hr

SCALE = 3

class Squares(hr.AsyncDataset):
    def __len__(self): return 4
    async def aget(self, index): return index * index

for placement in ("thread", "process"):
    with hr.DataLoader(Squares(), 2, num_workers=2, transform=lambda x: x * SCALE, placement=placement) as loader:
        print([batch.tolist() for batch in loader])
"""
TORCH = """
import headrace as hr

class Numbers:
    def __len__(self): return 4
    def __getitem__(self, index): return index

if __name__ == "__main__":
    with hr.DataLoader(Numbers(), 2, num_workers=2) as loader:
        print([batch.tolist() for batch in loader])
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [(ASYNC, "[[0, 3], [12, 27]]\n[[0, 3], [12, 27]]\n"), (TORCH, "[[0, 1], [2, 3]]\n")],
    ids=[
        "async dataset without a main guard",
        "torch dataset with one, which torch needs too",
    ],
)
def test_workers_start_where_the_default_start_method_is_forkserver(
    program, printed, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(FORKSERVER)
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    command = [sys.executable, tmp_path / "program.py"]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == (printed, 0), ended.stderr


def test_annotations_of_users_classes_are_not_evaluated(monkeypatch, tmp_path):
    def signature(function, *, annotation_format=None, whole=inspect.signature):
        if annotation_format != "STRING":
            raise NameError("name 'OnlyForTypeCheckers' is not defined")
        return whole(function)

    class Photos(hr.LinesDataset):
        def __init__(self, url, *, quality, **options):
            super().__init__(url, **options)

    (tmp_path / "0.txt").write_text("a\n")
    monkeypatch.setitem(
        sys.modules,
        "annotationlib",
        types.SimpleNamespace(Format=types.SimpleNamespace(STRING="STRING")),
    )
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    monkeypatch.setattr(inspect, "signature", signature)
    photos = Photos(tmp_path, quality=3)
    with pytest.raises(TypeError, match="Did you mean 'shuffle'"):
        Photos(tmp_path, quality=3, shufle=True)
    monkeypatch.undo()
    assert len(list(photos)) == 1
