"""The thin adapter to vLLM's V1 engine: everything that a port to another runner would touch."""
