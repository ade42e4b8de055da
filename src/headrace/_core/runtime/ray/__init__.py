"""Engines on a Ray cluster. Imported only where a loader has a `RayPlacement`: these modules import ray."""
