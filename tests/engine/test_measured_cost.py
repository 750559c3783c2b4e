"""The cost of a step can be measured at the start of every kind of engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import engine, greedy, outcomes, random_prompts, stats
from tests.tiny import save_gemma3, save_llama
from tests.tiny_multimodal import save_idefics3, save_paddleocr_vl

PROMPTS = random_prompts(5, 40)


@pytest.mark.parametrize(
    ("save", "options"),
    [
        (save_llama, {"enable_lora": True, "max_loras": 2}),
        (save_llama, {"enable_prompt_embeds": True}),
        (save_llama, {"max_num_batched_tokens": 8, "max_num_seqs": 2}),
        (save_gemma3, {}),
        (save_idefics3, {}),
        (save_paddleocr_vl, {}),
    ],
    ids=["lora", "prompt-embeds", "small-budget", "hybrid", "images", "m-rope"],
)
def test_engine_measures_its_steps_and_answers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Path], Path],
    options: dict[str, Any],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with engine(save(tmp_path / "model"), {"controller": True}, **options) as llm:
        answers = outcomes(llm, PROMPTS, greedy(20))
        curve = stats(llm)["step_cost"]
    assert [len(choice.token_ids) for [choice] in answers] == [20, 20]
    counts = [count for count, _ in curve]
    assert counts[:3] == [1, 2, 4]
    assert counts[-1] <= options.get("max_num_batched_tokens", 1 << 20)
