"""Two data-parallel engines behind one server: each looks ahead, and outputs are plain ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.harness import engine, greedy, outcomes, random_prompts
from tests.serving import MODEL_NAME, Server, serving

MAX_TOKENS = 64


def complete(server: Server, prompt: list[int]) -> tuple[int, ...]:
    """Token ids of the greedy continuation."""
    response = server.client.completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    [choice] = response.choices
    return tuple(choice.model_extra["token_ids"]) if choice.model_extra else ()


def drafts_by_engine(server: Server) -> dict[str, float]:
    """Number of drafts of each engine, by its index."""
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        for sample in family.samples
        if sample.name == "vllm:spec_decode_num_drafts_total"
    }


def test_both_engines_draft_and_answers_are_those_of_a_plain_engine(
    tiny_llama: Path, tmp_path: Path
) -> None:
    prompts = random_prompts(*range(5, 45, 5))
    with engine(tiny_llama) as llm:
        expected = [choice.token_ids for [choice] in outcomes(llm, prompts, greedy(MAX_TOKENS))]
    with (
        serving(
            tiny_llama,
            tmp_path,
            "--data-parallel-size=2",
            "--api-server-count=1",
            "--speculative-model=lookahead",
        ) as server,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        answers = list(threads.map(lambda prompt: complete(server, prompt), prompts))
        server.wait_until_idle()
        drafts = drafts_by_engine(server)
    assert answers == expected
    assert set(drafts) == {"0", "1"}
    assert all(count > 0 for count in drafts.values())
