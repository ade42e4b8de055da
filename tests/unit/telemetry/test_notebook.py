"""The report and the progress line in a notebook, through a real kernel; one, since its start takes 3 s of CPU."""

import re

import nbformat
from nbclient import NotebookClient

LOADER = """
import headrace as hr

class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 64

    async def aget(self, index):
        return index

loader = hr.DataLoader(Numbers(), batch_size=4)
for batch in hr.progress(loader, name="train"):
    pass
"""
LEFT = """
print("before")
async for batch in hr.progress(loader, interval=3600):
    raise RuntimeError("the step failed")
"""


def text_of(html):
    return re.sub("(&ensp;)+", " ", re.sub("<[^>]*>", "", html))


def test_report_and_progress_line_in_a_notebook():
    cells = [nbformat.v4.new_code_cell(source) for source in (LOADER, "loader.report()", LEFT, "loader.close()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, kernel_name="python3", timeout=60, allow_errors=True)
    client.create_kernel_manager().transport = "ipc"
    client.execute()
    first, report, left, closed = (cell.outputs for cell in notebook.cells)

    (line,) = first  # shown again and again, and once in the file
    assert line.output_type == "display_data"
    assert line.data["text/plain"].startswith("train epoch 0  batch 16/16  ")
    assert text_of(line.data["text/html"]).startswith("train epoch 0 batch 16/16 ")

    (table,) = report
    assert "<table>" in table.data["text/html"]

    printed, line, error = left
    assert printed.text == "before\n"
    assert line.data["text/plain"].startswith("epoch 1  stopped at batch 1/16  ")
    assert error.evalue == "the step failed"
    assert closed == []
