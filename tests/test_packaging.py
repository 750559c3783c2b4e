"""setup.cfg says what the code says."""

from __future__ import annotations

import configparser
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_lookahead.compat import SUPPORTED_VLLM, VLLM_DISTRIBUTIONS

ENTRY_POINTS = [
    ("vllm.general_plugins", "lookahead", "vllm_lookahead:register"),
    ("console_scripts", "vllm-lookahead", "vllm_lookahead.cli:main"),
]


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parents[1] / "setup.cfg")
    return parser


def requirements(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.splitlines() if line]


@pytest.mark.parametrize("distribution", VLLM_DISTRIBUTIONS)
def test_extras_ask_for_the_supported_vllm_range(
    setup_cfg: configparser.ConfigParser, distribution: str
) -> None:
    extras = setup_cfg["options.extras_require"].values()
    [found] = [each for text in extras for each in requirements(text) if each.name == distribution]
    assert found.specifier == SpecifierSet(SUPPORTED_VLLM)


def test_vllm_is_required_by_extras_only(setup_cfg: configparser.ConfigParser) -> None:
    names = {each.name for each in requirements(setup_cfg["options"]["install_requires"])}
    assert names.isdisjoint(VLLM_DISTRIBUTIONS)


@pytest.mark.parametrize(("group", "name", "target"), ENTRY_POINTS)
def test_entry_points_name_something_callable(
    setup_cfg: configparser.ConfigParser, group: str, name: str, target: str
) -> None:
    assert setup_cfg["options.entry_points"][group].split() == [name, "=", target]
    assert callable(EntryPoint(name, target, group).load())


def test_readme_repeats_the_supported_vllm_range() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"| vLLM | `{SUPPORTED_VLLM}` " in readme


def test_every_test_file_that_the_acceptance_list_names_exists() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs" / "acceptance.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[a-z_/]+\.py)`", text))
    assert len(named) > 10
    assert sorted(name for name in named if not (root / name).is_file()) == []
