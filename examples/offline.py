"""Batch generation with lookahead decoding: ``python examples/offline.py MODEL``."""

import sys

from vllm import LLM, SamplingParams

PROMPTS = [
    "The seven days of the week are",
    "def fibonacci(n):",
    "The capital of France is Paris. The capital of Italy is",
]


def main() -> None:
    llm = LLM(
        sys.argv[1],
        max_model_len=1024,
        speculative_config={
            "method": "lookahead",
            "window_size": 7,
            "ngram_size": 5,
            "verification_set_size": 7,
        },
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64)):
        print(output.prompt + output.outputs[0].text)
    [stats] = llm.collective_rpc("lookahead_stats")
    print(f"{stats['tokens'] / stats['steps']:.2f} tokens per decode step")


if __name__ == "__main__":
    main()
