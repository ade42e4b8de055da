"""Copies to an accelerator: side streams and page-locked memory."""
