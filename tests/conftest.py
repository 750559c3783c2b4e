"""Fixtures shared by all tests: tiny models, made once per run; CUDA tests skip with a reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.tiny import save_llama

# Engines run in the test's process, where their state can be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Tiny models gain nothing from a second thread, which spins and, on a busy machine, stalls them.
torch.set_num_threads(1)

# Shared machines stall at times, which says nothing about the code.
settings.register_profile("vllm_lookahead", deadline=None)
settings.load_profile("vllm_lookahead")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny fp32 Llama with a byte tokenizer."""
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)
