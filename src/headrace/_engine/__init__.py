"""The engine: fetching and assembly of batches on an event loop."""
