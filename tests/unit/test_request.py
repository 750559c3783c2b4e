"""What a request may say about lookahead, and what it is told when it may not."""

from __future__ import annotations

import pytest

from vllm_lookahead.config import LookaheadConfig, LookaheadConfigError
from vllm_lookahead.request import config_of_request

ENGINE = LookaheadConfig(window_size=7, ngram_size=5, verification_set_size=6)


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"lookahead": {}}])
def test_silent_request_gets_the_engines_configuration(extra_args: dict[str, object]) -> None:
    assert config_of_request(ENGINE, extra_args) == ENGINE


@pytest.mark.parametrize("value", [{"enabled": False}, '{"enabled": false}'])
def test_request_may_switch_lookahead_off(value: object) -> None:
    assert config_of_request(ENGINE, {"lookahead": value}) is None


def test_request_may_lower_sizes() -> None:
    lower = {"window_size": 2, "ngram_size": 3, "verification_set_size": 0}
    own = config_of_request(ENGINE, {"lookahead": lower})
    assert own == LookaheadConfig(window_size=2, ngram_size=3, verification_set_size=0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"window_size": 8}, "window_size .* from 0 to 7, the engine's, got 8"),
        ({"ngram_size": 1}, "ngram_size .* from 2 to 5, the engine's, got 1"),
        ({"verification_set_size": "3"}, "verification_set_size .* from 0 to 6.*got '3'"),
        ({"window_size": True}, "window_size .* got True"),
        ({"enabled": 1}, "enabled .* true or false, got 1"),
        ({"window_sise": 2}, "unknown key 'window_sise'.*did you mean 'window_size'"),
        ({"sources": ["prompt"]}, "unknown key 'sources'"),
        ({"window_size": 0, "verification_set_size": 0}, "leave nothing to verify"),
        ("{", "is no JSON: '{'"),
        ("[1]", r"must be a mapping such as .*got \[1\]"),
        (3, "must be a mapping such as .*got 3"),
    ],
    ids=str,
)
def test_bad_values_are_named_with_key_and_range(value: object, expected: str) -> None:
    with pytest.raises(LookaheadConfigError, match=expected):
        config_of_request(ENGINE, {"lookahead": value})


@pytest.mark.parametrize(
    ("key", "largest"), [("window_size", 7), ("ngram_size", 5), ("verification_set_size", 8)]
)
def test_request_may_ask_for_as_much_as_automatic_sizes_may_get(key: str, largest: int) -> None:
    engine = LookaheadConfig()
    own = config_of_request(engine, {"lookahead": {key: largest}})
    assert own == LookaheadConfig.from_mapping({key: largest})
    with pytest.raises(LookaheadConfigError, match=f"{key} .* to {largest}, the engine's"):
        config_of_request(engine, {"lookahead": {key: largest + 1}})


def test_request_leaves_the_other_sizes_automatic() -> None:
    own = config_of_request(LookaheadConfig(), {"lookahead": {"window_size": 0}})
    assert own is not None
    assert own == LookaheadConfig(window_size=0)
