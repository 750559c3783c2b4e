"""The scripts in examples/ do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.harness import engine, greedy, outcomes, random_prompts, stats

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_offline_example_generates(tiny_llama: Path) -> None:
    environ = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline.py"), str(tiny_llama)],
        env=environ,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "tokens per decode step" in result.stdout


def test_custom_source_example_proposes_its_phrases(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompts(20)[0]
    with engine(tiny_llama) as llm:
        [[plain]] = outcomes(llm, [prompt], greedy(20))
    monkeypatch.syspath_prepend(EXAMPLES)
    import custom_source

    # A phrase that begins with the text's tokens 4 and 5: when they are written, it is proposed.
    monkeypatch.setattr(custom_source, "PHRASES", [list(plain.token_ids[3:12])])
    sources = ["custom_source:PhraseSource"]
    with engine(tiny_llama, {"ngram_size": 8, "window_size": 0, "sources": sources}) as llm:
        assert outcomes(llm, [prompt], greedy(20)) == [[plain]]
        # 19 tokens after the prefill's; the phrase's 7 further tokens and a bonus take one step.
        assert stats(llm)["steps"] == 19 - 7
