"""Candidate sources: where the continuations to verify come from."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from vllm_lookahead.config import BUILTIN_SOURCES, LookaheadConfig, LookaheadConfigError


@runtime_checkable
class CandidateSource(Protocol):
    """Proposes continuations of one sequence's text.

    ``sources: ["module:Class"]`` names a class with this method; one instance is made per
    sequence by ``Class(config)`` with the `LookaheadConfig`. Right candidates make decoding
    faster; wrong ones cost time and never change the output.
    """

    def propose(self, context: Sequence[int], length: int, limit: int) -> Sequence[Sequence[int]]:
        """Candidates for what follows ``context``, best first.

        Args:
            context: prompt and output token ids so far; must not be changed.
            length: most tokens of a candidate that can be used.
            limit: most candidates that can be used.
        """
        ...


def load_source(name: str) -> type:
    """The class that ``module:Class`` names.

    Raises:
        LookaheadConfigError: it can't be imported or has no ``propose``.
    """
    module_name, _, attribute = name.partition(":")
    try:
        source = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise LookaheadConfigError(
            f"sources names {name!r}, which can't be loaded: {error}."
        ) from error
    if not callable(getattr(source, "propose", None)):
        raise LookaheadConfigError(
            f"sources names {name!r}, which has no method propose(context, length, limit)."
        )
    return source


def make_custom_sources(config: LookaheadConfig) -> dict[str, CandidateSource]:
    """One new instance per ``module:Class`` of the configuration, by name."""
    return {
        name: load_source(name)(config) for name in config.sources if name not in BUILTIN_SOURCES
    }
