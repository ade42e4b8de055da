"""Datasets that report the process that reads them, in a module that a spawned interpreter imports quickly."""

import multiprocessing
import random

import numpy as np
import torch
from torch.utils import data

LENGTH = 6


class Kinds(data.Dataset):
    """The class of the process that reads, and numbers from its generators."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        kind = type(multiprocessing.current_process()).__name__
        return index, kind, random.random(), np.random.random(), torch.rand(1).item()


class Indices(data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index


def in_process(samples):
    """A collate function that reports the class of its process."""
    return type(multiprocessing.current_process()).__name__, list(samples)
