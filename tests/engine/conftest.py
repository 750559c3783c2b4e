"""Fixtures shared by the engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import LLM

from tests.engine.harness import engine


@pytest.fixture(scope="package", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the tests' own: what engines find out about tiny models stays there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def off(tiny_llama: Path) -> Iterator[LLM]:
    """Plain vLLM with the tiny Llama, without prefix caching."""
    with engine(tiny_llama, enable_prefix_caching=False) as llm:
        yield llm
