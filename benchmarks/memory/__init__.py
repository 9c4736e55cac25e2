"""Memory and step-time benchmarks: `python -m benchmarks.memory.run --suite h200`."""
