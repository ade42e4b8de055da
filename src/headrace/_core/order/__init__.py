"""The order of an epoch's samples, and its state: saved, restored, and merged for all ranks."""
