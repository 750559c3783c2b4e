"""Token trees through causal paged attention: branches, and one file per vLLM backend."""
