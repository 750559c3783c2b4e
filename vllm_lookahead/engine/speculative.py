"""vLLM's speculative configuration with lookahead's own beside it."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from vllm.config import SpeculativeConfig
from vllm.config.utils import config


@config
class LookaheadSpeculativeConfig(SpeculativeConfig):
    """A custom speculative method that carries lookahead's parameters to every process."""

    lookahead: dict[str, Any] = Field(default_factory=dict)
    """`LookaheadConfig.to_json`."""
