"""Grammars of every kind, with both backends: valid, and what plain vLLM answers."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import scripted
from tests.engine.harness import engine, greedy, outcomes, random_prompts, seeded, stats

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= pair ("," pair){3}
pair ::= [a-z] "=" [0-9]
"""
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            }
        ],
        "at_least_one": True,
    },
}
JUNK_JSON = [ord(char) - 33 for char in '{"a":[1,2],}}{"b":"x"']
"""Tokens of printable characters start with that of "!", 33."""


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("xgrammar", ["json", "regex", "choice", "grammar", "tag"]),
        ("guidance", ["json", "regex", "choice"]),
    ],
)
def test_grammars_in_a_batch_with_free_text(
    tiny_llama: Path, backend: str, kinds: list[str]
) -> None:
    constraints: dict[str, Any] = {
        "json": {"json": SCHEMA},
        "regex": {"regex": "[0-9]{12}x"},
        "choice": {"choice": ["yes", "no", "maybe"]},
        "grammar": {"grammar": GRAMMAR},
        "tag": {"structural_tag": json.dumps(TAG)},
    }
    params = []
    for sampling in (greedy, partial(seeded, 7)):
        for kind in kinds:
            constraint = StructuredOutputsParams(**constraints[kind])
            params.append(sampling(max_tokens=60, structured_outputs=constraint, ignore_eos=False))
    params += [greedy(60), seeded(1, 60)]
    # Printable characters only, or half a character of the prompt would lead the answer's text.
    random = random_prompts(*range(10, 10 + 3 * len(params), 3))
    prompts = [JUNK_JSON, *([token % 94 for token in prompt] for prompt in random)][: len(params)]
    options: dict[str, Any] = {
        "structured_outputs_config": {"backend": backend, "disable_any_whitespace": True},
        "max_num_seqs": 16,
    }
    with engine(tiny_llama, **options) as llm:
        plain = outcomes(llm, prompts, params)
    texts = {kind: plain[index][0].text for index, kind in enumerate(kinds)}
    json.loads(texts["json"])
    assert re.fullmatch("[0-9]{12}x", texts["regex"])
    assert texts["choice"] in ("yes", "no", "maybe")
    lookahead = {
        "window_size": 4,
        "ngram_size": 4,
        "verification_set_size": 4,
        "sources": [scripted.NAME, "window", "output", "prompt"],
    }
    scripted.ScriptedSource.script(
        [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)], scripted.changing
    )
    with engine(tiny_llama, lookahead, **options) as llm:
        assert outcomes(llm, prompts, params) == plain
        assert stats(llm)["tokens"] > 1.3 * stats(llm)["steps"]
