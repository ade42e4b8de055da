"""
Files, tokenised in two workers
===============================

A folder of text files, read asynchronously, tokenized in two worker processes.

::

    python examples/01_files.py [FOLDER]

Without a folder it reads the Python files of the standard library's json package.
"""

import json
import pathlib
import sys

import torch

import headrace as hr

folder = (
    pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(json.__file__).parent
)
files = hr.FileDataset(folder, "**/*.py")


def count_words(sample):
    words = bytes(sample.data).decode(errors="replace").split()
    return {
        "key": sample.key,
        "words": torch.tensor(len(words)),
        "longest": max(map(len, words), default=0),
    }


with hr.DataLoader(files, batch_size=2, num_workers=2, transform=count_words) as loader:
    for batch in loader:
        for key, words, longest in zip(
            batch["key"], batch["words"], batch["longest"], strict=True
        ):
            print(
                f"{key:30} {words.item():6} words, the longest has {longest.item()} characters"
            )
print(f"{len(files)} files")
