"""Where the engine runs: in a thread, in a process, or not at all."""
