"""The algorithm, free of torch and of vLLM: pool, window, token tree, verification."""
