"""Code that depends on internals of torch.

A new release of torch concerns only this package.
"""
