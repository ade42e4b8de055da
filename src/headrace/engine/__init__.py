"""The stages that run on the engine's loop, fetch and assemble, and the life of one epoch."""
