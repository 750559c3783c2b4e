"""What a single request may say: lookahead off, or smaller than the engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_lookahead.config import (
    SIZE_RANGES,
    TREE_SIZES,
    LookaheadConfig,
    LookaheadConfigError,
    nearest_hint,
)

EXTRA_ARG = "lookahead"
"""Key in ``SamplingParams.extra_args``, and in ``vllm_xargs`` over HTTP."""

KEYS = ("enabled", *TREE_SIZES)
"""What a request may say: whether it looks ahead, and lower sizes."""


def config_of_request(
    config: LookaheadConfig, extra_args: Mapping[str, object] | None
) -> LookaheadConfig | None:
    """The configuration that a request runs with, None for plain decoding.

    Args:
        config: the engine's; its sizes are the largest that a request may ask for.
        extra_args: the request's; under ``lookahead`` a mapping of ``enabled`` and sizes, or the
            same as JSON text (HTTP's ``vllm_xargs`` can't nest).

    Raises:
        LookaheadConfigError: naming key, value and range.
    """
    if not extra_args or EXTRA_ARG not in extra_args:
        return config
    values = _parse(extra_args[EXTRA_ARG])
    for key in values:
        if key not in KEYS:
            raise LookaheadConfigError(
                f"unknown key {key!r} in a request's {EXTRA_ARG}{nearest_hint(str(key), KEYS)} "
                f"Known keys: {', '.join(KEYS)}."
            )
    enabled = values.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise LookaheadConfigError(
            f"enabled in a request's {EXTRA_ARG} must be true or false, got {enabled!r}."
        )
    largest = config.largest
    for key, value in values.items():
        low, high = SIZE_RANGES[key][0], getattr(largest, key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise LookaheadConfigError(
                f"{key} in a request's {EXTRA_ARG} must be an integer from {low} to {high}, the "
                f"engine's, got {value!r}."
            )
    own = replace(config, **values)
    return own if enabled else None


def _parse(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise LookaheadConfigError(
                f"a request's {EXTRA_ARG} is no JSON: {value!r} ({error})."
            ) from error
    if not isinstance(value, Mapping):
        raise LookaheadConfigError(
            f"a request's {EXTRA_ARG} must be a mapping such as "
            f'{{"enabled": false}} or {{"window_size": 2}}, got {value!r}.'
        )
    return dict(value)
