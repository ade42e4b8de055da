"""Numbered worker processes, and how batches travel to them and back."""
