"""The flag ``--speculative-model`` of ``vllm serve``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from vllm_lookahead.plugin import METHOD_SPELLINGS

_MODERN_METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
}


def modern_spelling(model: str) -> str:
    """How today's vLLM is asked for what ``--speculative-model MODEL`` used to mean."""
    name = model.strip("[]")
    config = _MODERN_METHODS.get(name, {"model": model, "num_speculative_tokens": 5})
    return f"--speculative-config '{json.dumps(config)}'"


class SpeculativeModelAction(argparse.Action):
    """Accepts lookahead, and answers anything else with its modern spelling."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values not in METHOD_SPELLINGS:
            parser.error(
                f"--speculative-model takes only [lookahead] (or lookahead), got {values!r}. "
                f"For other methods vLLM has: {modern_spelling(str(values))}"
            )
        namespace.speculative_model = "lookahead"
        # EngineArgs has this field, which `create_speculative_config` reads.
        namespace.spec_method = "lookahead"
