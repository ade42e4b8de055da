"""Where the engine runs."""
