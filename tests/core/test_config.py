"""What `LookaheadConfig` accepts, refuses and derives."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from vllm_lookahead.config import LookaheadConfig, LookaheadConfigError

RANGES = [
    ("window_size", 0, 128),
    ("ngram_size", 2, 32),
    ("verification_set_size", 0, 128),
    ("pool_capacity", 1, 1048576),
    ("seed", 0, 4294967295),
]
INTEGERS = [key for key, _, _ in RANGES]


def refusal(**values: Any) -> str:
    with pytest.raises(LookaheadConfigError) as error:
        LookaheadConfig(**values)
    return str(error.value)


# Ranges and types


@pytest.mark.parametrize(("key", "low", "high"), RANGES)
def test_both_ends_of_an_integer_range_are_accepted(key: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(LookaheadConfig.from_mapping({key: value}), key) == value


@pytest.mark.parametrize(("key", "low", "high"), RANGES)
def test_integer_out_of_range_is_refused_with_key_value_and_range(
    key: str, low: int, high: int
) -> None:
    for value in (low - 1, high + 1):
        assert refusal(**{key: value}) == f"{key} must be from {low} to {high}, got {value}."


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", ["7", 7.0, None, True, [7]])
def test_integer_of_another_type_is_refused_with_key_and_value(key: str, value: object) -> None:
    message = refusal(**{key: value})
    assert message.startswith(f"{key} must be an integer")
    assert repr(value) in message


def test_ngram_of_one_token_is_refused() -> None:
    assert refusal(ngram_size=1) == "ngram_size must be from 2 to 32, got 1."


@pytest.mark.parametrize("value", [0.001, 0.5])
def test_both_ends_of_the_scratch_fraction_are_accepted(value: float) -> None:
    assert LookaheadConfig(scratch_fraction=value).scratch_fraction == value


@pytest.mark.parametrize("value", [0, -0.1, 0.501, 1, float("nan"), float("inf")])
def test_scratch_fraction_out_of_range_is_refused_with_key_value_and_range(value: float) -> None:
    message = refusal(scratch_fraction=value)
    assert message == f"scratch_fraction must be over 0 and at most 0.5, got {value!r}."


@pytest.mark.parametrize("value", ["0.1", None, True])
def test_scratch_fraction_of_another_type_is_refused(value: object) -> None:
    assert refusal(scratch_fraction=value) == f"scratch_fraction must be a number, got {value!r}."


@pytest.mark.parametrize("value", [1, "true", None])
def test_verify_window_must_be_a_boolean(value: object) -> None:
    assert refusal(verify_window=value) == f"verify_window must be true or false, got {value!r}."


def test_no_window_and_no_candidates_together_are_refused_with_both_ways_out() -> None:
    message = refusal(window_size=0, verification_set_size=0)
    assert "set window_size (1 to 128) or verification_set_size (1 to 128)" in message


def test_values_cannot_be_changed_afterwards() -> None:
    config = LookaheadConfig()
    with pytest.raises(FrozenInstanceError):
        config.window_size = 3  # type: ignore[misc]


# Unknown keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("windw_size", "window_size"),
        ("ngram-size", "ngram_size"),
        ("verification_size", "verification_set_size"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_known_one(key: str, nearest: str) -> None:
    with pytest.raises(LookaheadConfigError) as error:
        LookaheadConfig.from_mapping({key: 5})
    assert f"unknown lookahead parameter {key!r}; did you mean {nearest!r}?" in str(error.value)


def test_unknown_key_like_no_known_one_is_refused_with_all_known_ones() -> None:
    with pytest.raises(LookaheadConfigError) as error:
        LookaheadConfig.from_mapping({"temperature": 5})
    message = str(error.value)
    assert message.startswith("unknown lookahead parameter 'temperature'. Known parameters: ")
    assert all(field.name in message for field in fields(LookaheadConfig))


# Sources


def test_sources_may_be_a_list() -> None:
    config = LookaheadConfig.from_mapping({"sources": ["prompt", "my.module:Class"]})
    assert config.sources == ("prompt", "my.module:Class")


@pytest.mark.parametrize("value", ["window", None, {"window"}, 3])
def test_sources_of_another_type_are_refused(value: object) -> None:
    assert refusal(sources=value) == f"sources must be a list of names, got {value!r}."


def test_source_that_is_no_name_is_refused() -> None:
    assert refusal(sources=["window", 3]) == "sources must be names, got 3."


def test_misspelt_source_is_refused_with_the_nearest_builtin_one() -> None:
    assert "sources has 'promt'; did you mean 'prompt'?" in refusal(sources=["promt"])


@pytest.mark.parametrize("name", ["elsewhere", "module:", ":Class", ":", ""])
def test_source_that_is_neither_builtin_nor_a_class_path_is_refused(name: str) -> None:
    message = refusal(sources=[name])
    assert message == f"sources has {name!r}. Give window, output, prompt or 'module:Class'."


def test_repeated_source_is_refused() -> None:
    assert "sources repeats a name: ['window', 'window']" in refusal(sources=["window", "window"])


# Derived values


@pytest.mark.parametrize(
    ("W", "N", "G", "drafts", "branches", "depth"),
    [
        # Depth: row N - 2, column W - 1 stands W + N - 3 after the root, a candidate N - 1.
        (7, 5, 7, 4, 15, 9),
        (0, 5, 7, 4, 8, 4),
        (1, 5, 1, 4, 3, 4),
        (2, 5, 0, 4, 3, 4),
        (3, 5, 0, 4, 4, 5),
        (15, 2, 1, 1, 17, 14),
    ],
)
def test_tree_bounds_follow_from_the_sizes(
    W: int, N: int, G: int, drafts: int, branches: int, depth: int
) -> None:
    config = LookaheadConfig(window_size=W, ngram_size=N, verification_set_size=G)
    assert not config.is_jacobi
    assert (config.num_draft_tokens, config.max_branches, config.max_depth) == (
        drafts,
        branches,
        depth,
    )


@pytest.mark.parametrize(("W", "drafts"), [(1, 1), (2, 1), (8, 7)])
def test_one_row_and_no_candidates_is_jacobi_decoding_of_the_whole_row(W: int, drafts: int) -> None:
    config = LookaheadConfig(window_size=W, ngram_size=2, verification_set_size=0)
    assert config.is_jacobi
    assert (config.num_draft_tokens, config.max_depth) == (drafts, drafts)


@pytest.mark.parametrize(
    ("G", "sources", "expected"),
    [
        (7, ["window"], True),
        (1, ["module:Class", "output"], True),
        (0, ["window", "output", "prompt"], False),
        (7, ["module:Class"], False),
        (7, [], False),
    ],
)
def test_pool_is_used_only_for_candidates_from_builtin_sources(
    G: int, sources: list[str], expected: bool
) -> None:
    config = LookaheadConfig.from_mapping({"verification_set_size": G, "sources": sources})
    assert config.uses_pool is expected


def test_json_form_makes_an_equal_configuration() -> None:
    values = {
        "window_size": 3,
        "ngram_size": 4,
        "verification_set_size": 2,
        "sources": ["my.module:Class", "prompt"],
        "verify_window": False,
        "pool_capacity": 99,
        "scratch_fraction": 0.25,
        "seed": 17,
    }
    assert set(values) == {field.name for field in fields(LookaheadConfig)}
    config = LookaheadConfig.from_mapping(values)
    assert json.loads(json.dumps(config.to_json())) == values
    assert LookaheadConfig.from_mapping(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("sources", [[], ["window"]])
def test_no_window_and_no_other_source_is_refused(sources: list[str]) -> None:
    message = refusal(window_size=0, sources=sources)
    assert f"window_size=0 with sources={sources} leaves nothing to propose" in message
    assert "1 to 128" in message
