"""The decoding methods that the speed commands compare, and the engines that run them."""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.engine_process import Request
from benchmarks.engines import base_parser
from benchmarks.prompts import Conversation
from vllm_lookahead.cli.demo import demo_model, positive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = "plain"
SUFFIX = "suffix"
NGRAM_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""As in vLLM's own example of speculative decoding (spec_decode.py)."""
ARCTIC_INSTALL = "pip install --no-deps arctic-inference==0.1.1"
MODEL_TEXT_SECONDS = 600
"""Time for lookahead's engines to write their text to its end at once, not start by start."""
WARM_UP_TOKENS = 64
WARM_UP_TEXT = "Repeat the days of the week three times: Monday, Tuesday, Wednesday."


def speed_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of every command that starts engines side by side."""
    parser = base_parser(description)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--kv-cache-mib", type=positive, default=1024, help="of each engine")
    parser.add_argument(
        "--enforce-eager", action="store_true", help="no compilation: for trying a command out"
    )
    parser.add_argument(
        "--executor",
        choices=("uni", "mp"),
        default="uni",
        help="mp: a worker process beside each engine, as vLLM has by itself (default: uni, none)",
    )
    return parser


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lookahead",
        type=lookahead_config,
        action="append",
        metavar="JSON",
        help='lookahead\'s parameters; give it again to compare several (default: "{}")',
    )
    parser.add_argument(
        "--ngram",
        type=int,
        nargs="*",
        default=[3, 5, 8],
        metavar="N",
        help="num_speculative_tokens of vLLM's ngram method (default: 3 5 8)",
    )
    parser.add_argument("--no-suffix", action="store_true", help="without vLLM's suffix method")


def lookahead_config(text: str) -> dict[str, Any]:
    """argparse type: a JSON object, with or without the method's name."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError
    return {**values, "method": "lookahead"}


def lookahead_name(config: dict[str, Any]) -> str:
    """``lookahead``, with the parameters that are given."""
    given = {key: value for key, value in config.items() if key != "method"}
    return f"lookahead {json.dumps(given)}" if given else "lookahead"


def speculative_configs(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """``speculative_config`` of each method by its name, plain vLLM first.

    Without arctic-inference the method suffix is left out, and the console is told.
    """
    configs: dict[str, Any] = {PLAIN: None}
    for config in args.lookahead or [lookahead_config("{}")]:
        configs[lookahead_name(config)] = {"model_text_seconds": MODEL_TEXT_SECONDS, **config}
    for tokens in args.ngram:
        one = {"method": "ngram", "num_speculative_tokens": tokens, **NGRAM_LOOKUP}
        configs[f"ngram {tokens}"] = one
    if args.no_suffix:
        return configs
    if importlib.util.find_spec("arctic_inference") is None:
        console.print(f"Without suffix: it needs arctic-inference, here absent: {ARCTIC_INSTALL}")
        return configs
    # vLLM's default of num_speculative_tokens is the depth of the suffix tree.
    return {**configs, SUFFIX: {"method": "suffix"}}


def engine_options(args: argparse.Namespace, config: Any, **options: Any) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for a method's ``speculative_config``."""
    defaults = {
        "model": model_path(args),
        "dtype": args.dtype,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": args.kv_cache_mib << 20,
        "enable_prefix_caching": False,
        "enforce_eager": args.enforce_eager,
        "distributed_executor_backend": args.executor,
    }
    if config is not None:
        defaults["speculative_config"] = config
    return {**defaults, **options}


def model_path(args: argparse.Namespace) -> str:
    if args.model is None:
        args.model = demo_model()
    return str(args.model)


class PromptEncoder:
    """Conversations and texts as token ids of the command's model."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)

    def chat(self, conversation: Conversation) -> list[int]:
        """The conversation in the model's chat template, up to where the answer begins."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )
        return ids

    def text(self, text: str) -> list[int]:
        """Token ids of a text alone."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def warm_up(self, size: int = 1) -> Request:
        """A first request of ``size`` prompts, with a text that no prompt set has."""
        prompt = self.chat([{"role": "user", "content": WARM_UP_TEXT}])
        return Request([prompt] * size, WARM_UP_TOKENS)
