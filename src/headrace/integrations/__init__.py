"""Integrations with trainers, a module for each trainer.

Only the module of a trainer imports the trainer. No other module of headrace imports an
integration.
"""
