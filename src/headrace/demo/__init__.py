"""What `headrace demo` runs: a training job on objects streamed over HTTP, and a comparison with torch's loader."""
