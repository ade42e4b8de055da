"""Order of samples, and state of a loader.

State is saved, restored, and merged over all ranks.
"""
