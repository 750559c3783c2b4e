"""A fault of one request's planning costs nothing but that request's speed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.engine.harness import drain, engine, greedy, outcomes, random_prompts, stats


class Log(logging.Handler):
    """Keeps messages. (pytest's caplog needs propagation, which vLLM switches off.)"""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize("source", ["RaisingSource", "OutOfVocabularySource"])
def test_faulty_source_leaves_the_request_plain_and_neighbours_untouched(
    tiny_llama: Path, source: str
) -> None:
    prompts = [
        [13, *prompt] if i % 2 else prompt for i, prompt in enumerate(random_prompts(*[9] * 6))
    ]
    with engine(tiny_llama) as llm:
        plain = outcomes(llm, prompts, greedy(40))
    log = Log()
    with engine(tiny_llama, {"sources": [f"tests.engine.faulty:{source}", "window"]}) as llm:
        logging.getLogger("vllm.lookahead").addHandler(log)
        assert outcomes(llm, prompts, greedy(40)) == plain
        drain(llm)
        assert stats(llm)["sequences"] == 0
    logging.getLogger("vllm.lookahead").removeHandler(log)
    faults = [message for message in log.messages if "goes on plainly" in message]
    assert len(faults) == 3, "once for each faulty request"
