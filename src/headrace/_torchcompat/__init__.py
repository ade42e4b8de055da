"""Code for internals of torch.

A new release of torch concerns only this package.
"""
