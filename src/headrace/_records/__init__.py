"""Records between stages: plans, batches, messages and failures."""
