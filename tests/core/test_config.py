"""What `LookaheadConfig` accepts, refuses and derives."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from vllm_lookahead.config import SIZE_RANGES, LookaheadConfig, LookaheadConfigError

RANGES = [
    ("window_size", 0, 128),
    ("ngram_size", 2, 32),
    ("verification_set_size", 0, 128),
    ("draft_length", 1, 127),
    ("pool_capacity", 1, 1048576),
    ("model_text_tokens", 1, 1048576),
    ("shared_capacity", 1, 16777216),
    ("seed", 0, 4294967295),
]
INTEGERS = [key for key, _, _ in RANGES]
SIZES = ["window_size", "ngram_size", "verification_set_size", "draft_length"]


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
        automatic = ' (or "auto")' if key in SIZE_RANGES else ""
        expected = f"{key} must be from {low} to {high}{automatic}, got {value}."
        assert refusal(**{key: value}) == expected


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", ["7", 7.0, None, True, [7]])
def test_integer_of_another_type_is_refused_with_key_and_value(key: str, value: object) -> None:
    message = refusal(**{key: value})
    assert message.startswith(f"{key} must be an integer")
    assert repr(value) in message


def test_ngram_of_one_token_is_refused() -> None:
    assert refusal(ngram_size=1) == 'ngram_size must be from 2 to 32 (or "auto"), got 1.'


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


@pytest.mark.parametrize("key", ["verify_window", "controller"])
@pytest.mark.parametrize("value", [1, 0, "true", "auto", None])
def test_switch_must_be_a_boolean(key: str, value: object) -> None:
    assert refusal(**{key: value}) == f"{key} must be true or false, got {value!r}."


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


# Automatic sizes


@pytest.mark.parametrize("key", SIZES)
def test_size_may_be_left_to_the_machine(key: str) -> None:
    assert getattr(LookaheadConfig.from_mapping({key: "auto"}), key) == "auto"
    assert getattr(LookaheadConfig(), key) == "auto"


@pytest.mark.parametrize("value", [-1, 86401, "20", True, None, float("nan")])
def test_seconds_for_the_models_text_out_of_range_are_refused(value: object) -> None:
    assert refusal(model_text_seconds=value) == (
        f"model_text_seconds must be a number from 0 to 86400, got {value!r}."
    )


@pytest.mark.parametrize("key", ["pool_capacity", "model_text_tokens", "shared_capacity", "seed"])
def test_what_is_no_size_is_not_left_to_the_machine(key: str) -> None:
    assert refusal(**{key: "auto"}).startswith(f"{key} must be an integer")


@pytest.mark.parametrize("value", ["AUTO", "Auto", " auto", ""])
def test_misspelt_auto_is_refused(value: str) -> None:
    message = refusal(window_size=value)
    assert message.startswith("window_size must be an integer from 0 to 128")
    assert repr(value) in message


@pytest.mark.parametrize(
    ("free_tokens", "sizes"),
    [
        (1, (2, 3, 8)),
        (23, (2, 3, 8)),
        (24, (4, 4, 8)),
        (39, (4, 4, 8)),
        (40, (7, 5, 8)),
        (4096, (7, 5, 8)),
    ],
)
def test_automatic_sizes_grow_with_the_tokens_that_are_free(
    free_tokens: int, sizes: tuple[int, int, int]
) -> None:
    config = LookaheadConfig().sized(free_tokens)
    assert (config.window_size, config.ngram_size, config.verification_set_size) == sizes
    assert config.num_draft_tokens == 12


def test_sizes_that_were_given_stay_when_the_others_are_chosen() -> None:
    config = LookaheadConfig(window_size=0, draft_length=3).sized(40)
    assert (config.window_size, config.ngram_size, config.verification_set_size) == (0, 5, 8)
    assert config.num_draft_tokens == 3


@pytest.mark.parametrize("free_tokens", [1, 24, 40])
def test_configuration_without_automatic_sizes_is_sized_already(free_tokens: int) -> None:
    config = LookaheadConfig(window_size=3, ngram_size=4, verification_set_size=2)
    assert config.sized(free_tokens) == config == config.largest


@pytest.mark.parametrize("free_tokens", [1, 24, 40])
def test_no_sized_configuration_is_larger_than_the_largest(free_tokens: int) -> None:
    sized, largest = LookaheadConfig().sized(free_tokens), LookaheadConfig().largest
    for bound in ("num_draft_tokens", "max_branches", "max_depth"):
        assert getattr(sized, bound) <= getattr(largest, bound)


def test_sizing_leaves_all_but_the_sizes_alone() -> None:
    rest = LookaheadConfig(seed=7, sources=("prompt",), controller=False, pool_capacity=9).largest
    assert (rest.seed, rest.sources, rest.controller, rest.pool_capacity) == (
        7,
        ("prompt",),
        False,
        9,
    )


@pytest.mark.parametrize(("ngram_size", "drafts"), [(2, 1), (5, 4), (32, 31)])
def test_candidates_are_as_long_as_the_ngrams_whose_size_was_given(
    ngram_size: int, drafts: int
) -> None:
    assert LookaheadConfig(ngram_size=ngram_size).largest.num_draft_tokens == drafts


@pytest.mark.parametrize(("length", "depth"), [(1, 9), (9, 9), (20, 20)])
def test_tree_is_as_deep_as_the_draft_length_or_the_window(length: int, depth: int) -> None:
    config = LookaheadConfig(
        window_size=7, ngram_size=5, verification_set_size=7, draft_length=length
    )
    assert (config.num_draft_tokens, config.max_depth) == (length, depth)


# Step cost


@pytest.mark.parametrize("value", ["measured", "flat"])
def test_step_cost_may_be_a_word(value: str) -> None:
    assert LookaheadConfig.from_mapping({"step_cost": value}).step_cost == value


@pytest.mark.parametrize(
    "value", [[[1, 1], [16, 1.5]], ((1, 1.0), (16, 1.5))], ids=["lists", "tuples"]
)
def test_step_cost_may_be_pairs(value: object) -> None:
    config = LookaheadConfig.from_mapping({"step_cost": value})
    assert config.step_cost == ((1, 1.0), (16, 1.5))
    assert hash(config) == hash(LookaheadConfig.from_mapping(config.to_json()))


@pytest.mark.parametrize(
    "value",
    [
        "free",
        None,
        1.0,
        {},
        [],
        [1, 2],
        [[1]],
        [[1, 1.0, 2]],
        [[0, 1.0]],
        [[1, 0]],
        [[1, -1.0]],
        [[1, float("nan")]],
        [[1, "1.0"]],
        [[True, 1.0]],
        [[1, 1.0], [1, 2.0]],
        [[2, 1.0], [1, 2.0]],
    ],
    ids=str,
)
def test_step_cost_that_is_no_curve_is_refused_with_an_example(value: object) -> None:
    assert refusal(step_cost=value) == (
        'step_cost must be "measured", "flat" or ascending pairs of tokens and cost, such as '
        f"[[1, 1.0], [16, 1.5]], got {value!r}."
    )


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


@pytest.mark.parametrize("name", ["elsewhere", "package.module:", ":Class", ":", ""])
def test_source_that_is_neither_builtin_nor_a_class_path_is_refused(name: str) -> None:
    assert refusal(sources=[name]) == (
        f"sources has {name!r}. "
        "Give suffix, model, window, output, prompt, shared or 'module:Class'."
    )


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
        (7, ["suffix", "prompt"], True),
        (7, ["suffix", "shared", "model"], False),
        (7, ["module:Class"], False),
        (7, [], False),
    ],
)
def test_pool_is_used_only_for_candidates_from_the_sources_that_fill_it(
    G: int, sources: list[str], expected: bool
) -> None:
    config = LookaheadConfig.from_mapping({"verification_set_size": G, "sources": sources})
    assert config.uses_pool is expected


@pytest.mark.parametrize(
    ("G", "sources", "expected"),
    [
        (7, ["model"], True),
        ("auto", ["suffix", "model"], True),
        (7, ["suffix", "window", "output", "prompt", "shared"], False),
        (0, ["model"], False),
    ],
)
def test_model_writes_text_only_for_candidates_of_its_source(
    G: object, sources: list[str], expected: bool
) -> None:
    config = LookaheadConfig.from_mapping({"verification_set_size": G, "sources": sources})
    assert config.uses_model_text is expected


def test_json_form_makes_an_equal_configuration() -> None:
    values = {
        "window_size": 3,
        "ngram_size": 4,
        "verification_set_size": 2,
        "draft_length": 6,
        "controller": False,
        "step_cost": [[1, 1.0], [16, 1.5]],
        "sources": ["my.module:Class", "prompt"],
        "verify_window": False,
        "pool_capacity": 99,
        "model_text_tokens": 999,
        "model_text_seconds": 0.5,
        "shared_capacity": 9999,
        "scratch_fraction": 0.25,
        "seed": 17,
    }
    assert set(values) == {field.name for field in fields(LookaheadConfig)}
    config = LookaheadConfig.from_mapping(values)
    assert json.loads(json.dumps(config.to_json())) == values
    assert LookaheadConfig.from_mapping(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("step_cost", ["measured", "flat"])
def test_json_form_keeps_what_is_decided_later(step_cost: str) -> None:
    values = dict.fromkeys(SIZES, "auto") | {"step_cost": step_cost}
    config = LookaheadConfig.from_mapping(values)
    text = json.dumps(config.to_json())
    assert {key: json.loads(text)[key] for key in values} == values
    assert LookaheadConfig.from_mapping(json.loads(text)) == config


@pytest.mark.parametrize("sources", [[], ["window"]])
def test_no_window_and_no_other_source_is_refused(sources: list[str]) -> None:
    message = refusal(window_size=0, sources=sources)
    assert f"window_size=0 with sources={sources} leaves nothing to propose" in message
    assert "1 to 128" in message
