"""Arithmetic and choices of the benchmark commands; none of them starts an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.context import cut
from benchmarks.engine_process import Reply, Request, answer
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


class Engine:
    """Answers as many tokens as a prompt has, one a step, to all prompts at once."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.sizes: list[int] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: object) -> None:
        self.left[name] = len(prompt["prompt_token_ids"])

    def step(self) -> list[SimpleNamespace]:
        self.sizes.append(len(self.left))
        for name in self.left:
            self.left[name] -= 1
        outputs = [
            SimpleNamespace(
                request_id=name, finished=not left, outputs=[SimpleNamespace(token_ids=[left])]
            )
            for name, left in self.left.items()
        ]
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs


@pytest.mark.parametrize(
    ("at_once", "sizes", "full"),
    # A prompt's first token makes no decode step.
    [(None, [3, 2, 1], []), (2, [2, 2, 1, 1], []), (1, [1] * 6, [2, 4, 5])],
)
def test_next_prompt_is_sent_when_one_is_answered(
    at_once: int | None, sizes: list[int], full: list[int]
) -> None:
    llm = SimpleNamespace(llm_engine=Engine())
    request = Request([[0], [0, 0], [0, 0, 0]], 9, at_once=at_once)
    reply = answer(llm, request, counts=False)
    assert reply.token_ids == [[0], [1, 0], [2, 1, 0]]
    assert llm.llm_engine.sizes == sizes
    assert reply.full_decode_steps == full


def test_full_decode_steps_have_their_own_timing() -> None:
    reply = Reply([[1, 2], [3, 4]], 4.0, [1.0, 2.0, 4.0], [1, 1, 2], 2, {}, [1, 2])
    assert reply.full_decode_timing == Timing(3, 6.0)


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
