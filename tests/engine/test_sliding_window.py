"""Models whose attention slides: exact past the window, with winners off the primary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import scripted
from tests.engine.harness import engine, greedy, outcomes, random_prompts, runner, seeded, stats
from tests.tiny import save_gemma3, save_sliding_mistral


@pytest.mark.parametrize(
    ("save", "groups"), [(save_sliding_mistral, 1), (save_gemma3, 2)], ids=["mistral", "gemma3"]
)
def test_outputs_past_the_window_are_plain(
    tmp_path: Path, save: Callable[[Path], Path], groups: int
) -> None:
    model = save(tmp_path / "model")
    prompts = random_prompts(1, 20, 40, 47, 48, 60, 100, 200)
    params = [greedy(100), seeded(3, 100)] * 4
    with engine(model) as llm:
        plain = outcomes(llm, prompts, params)
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    sizes = {"window_size": 4, "ngram_size": 4, "verification_set_size": 4}
    with engine(model, {**sizes, "sources": [scripted.NAME, "window", "output"]}) as llm:
        assert len(runner(llm).kv_cache_config.kv_cache_groups) >= groups
        for shape in (scripted.right_third, scripted.changing):
            scripted.ScriptedSource.script(texts, shape)
            before = stats(llm)["off_primary"]
            assert outcomes(llm, prompts, params) == plain
            assert stats(llm)["off_primary"] - before > 50
