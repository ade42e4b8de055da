"""Batches on their way to an accelerator: side-stream copies, page-locked memory."""
