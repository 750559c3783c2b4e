"""Arithmetic and choices of the benchmark commands; none of them starts an engine."""

from __future__ import annotations

import pytest

from benchmarks.context import cut
from benchmarks.engine_process import Reply
from benchmarks.forced_source import WrongChains
from benchmarks.interleaved import openmp_env, rotated
from benchmarks.prompts import SIMULATOR_ROWS, SPEED_ROWS
from benchmarks.ratios import Timing, bootstrap_interval, geometric_mean, rate, speedup
from benchmarks.report import Table
from benchmarks.step_cost import sizes
from vllm_lookahead.config import LookaheadConfig

PLAIN = {"a": [Timing(10, 1), Timing(10, 1)], "b": [Timing(10, 2)]}
TWICE = {"a": [Timing(20, 1), Timing(20, 1)], "b": [Timing(20, 2)]}


def test_a_rate_comes_from_sums() -> None:
    assert rate([Timing(10, 1), Timing(30, 3), Timing(0, 1)]) == 8


def test_a_geometric_mean_undoes_reciprocal_factors() -> None:
    assert geometric_mean([4, 0.25, 8]) == pytest.approx(2)


def test_a_speedup_weighs_prompt_sets_equally() -> None:
    method = {"a": [Timing(40, 1), Timing(40, 1)], "b": [Timing(10, 2)]}
    assert speedup(method, PLAIN) == pytest.approx(2)


def test_an_interval_of_equal_ratios_is_a_point() -> None:
    assert bootstrap_interval(TWICE, PLAIN) == pytest.approx((2, 2))


def test_an_interval_holds_the_ratios_of_single_prompts() -> None:
    plain = {"a": [Timing(10, 1)] * 10}
    method = {"a": [Timing(10, 1), Timing(30, 1)] * 5}
    low, high = bootstrap_interval(method, plain)
    assert 1 < low < 2 < high < 3


def test_the_prompts_for_speed_are_ten_of_each_set_that_the_simulator_did_not_see() -> None:
    for name, rows in SPEED_ROWS.items():
        assert len(rows) == 10
        assert not set(rows) & set(SIMULATOR_ROWS[name])


def test_each_engine_comes_first_equally_often() -> None:
    orders = [rotated("abc", turn) for turn in range(6)]
    assert [order[0] for order in orders] == list("abcabc")
    assert all(sorted(order) == list("abc") for order in orders)


def test_only_steps_after_every_first_token_are_decode_steps() -> None:
    reply = Reply([[1, 2], [3, 4]], 4.0, [1.0] * 3, [1, 1, 2], 2, {})
    assert (reply.num_tokens, reply.decode_steps, reply.decode_tokens) == (4, 1, 2)


@pytest.mark.parametrize("tokens", [1, 4, 8, 32])
def test_wrong_chains_feed_as_many_tokens_as_asked_for(tokens: int) -> None:
    chosen = sizes(tokens)
    chains = WrongChains(LookaheadConfig()).propose(
        [7], chosen["ngram_size"] - 1, chosen["verification_set_size"]
    )
    assert 1 + sum(map(len, chains)) == tokens
    assert len({chain[0] for chain in chains}) == len(chains)


def test_a_cut_prompt_goes_on_at_the_start_of_the_text() -> None:
    assert cut([0, 1, 2, 3], 1, 2, 6) == [2, 3, 0, 1, 2, 3]


def test_a_table_is_markdown() -> None:
    table = Table("T", ["a", "b"], [["x|y", "1"]], ["A note."])
    assert table.markdown().splitlines() == [
        "**T**", "", "| a | b |", "| --- | ---: |", r"| x\|y | 1 |", "", "A note.",
    ]  # fmt: skip


def test_openmp_is_set_up_for_a_list_of_cores_only() -> None:
    preload = {"LD_PRELOAD": "/lib/libtcmalloc.so:/lib/libiomp5.so"}
    chosen = openmp_env({**preload, "VLLM_CPU_OMP_THREADS_BIND": "0,1"})
    assert chosen["OMP_NUM_THREADS"] == "2"
    assert "proclist=[0,1]" in chosen["KMP_AFFINITY"]
    assert openmp_env({**preload, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}) == {}
    assert openmp_env({"VLLM_CPU_OMP_THREADS_BIND": "0,1"}) == {}
