"""The only place where functions of vLLM are wrapped.

Three wraps, each with its reason. Two translate what users write ("lookahead") into settings that
vLLM has: a custom speculative method, a worker class and a scheduler class. The third lets requests
through that vLLM refuses beside its own speculative methods.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_lookahead.compat import unsupported_vllm, vllm_version
from vllm_lookahead.config import LookaheadConfig, LookaheadConfigError
from vllm_lookahead.core.sources import make_custom_sources
from vllm_lookahead.request import config_of_request

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

METHOD = "lookahead"
METHOD_SPELLINGS = (METHOD, f"[{METHOD}]")
PROPOSER = "vllm_lookahead.engine.proposer.LookaheadProposer"
WORKER = "vllm_lookahead.engine.worker.LookaheadCPUWorker"
SCHEDULER = "vllm_lookahead.engine.scheduler.LookaheadScheduler"

_WRAPPED = "_vllm_lookahead_wrapped"


def install() -> None:
    """Install the wraps; a second call changes nothing.

    Raises:
        RuntimeError: a wrapped function is gone; vLLM doesn't catch it, so its command ends.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    _wrap(EngineArgs, "add_cli_args", _wrap_add_cli_args)
    _wrap(EngineArgs, "create_speculative_config", _wrap_create_speculative_config)
    _wrap(SamplingParams, "_validate_spec_decode", _wrap_validate_spec_decode)


def _wrap(owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    target = getattr(owner, name, None)
    if target is None:
        raise RuntimeError(f"vllm_lookahead wraps {owner.__name__}.{name}, which vLLM hasn't got.")
    if getattr(target, _WRAPPED, False):
        return
    wrapped = wrapper(target)
    setattr(wrapped, _WRAPPED, True)
    is_static = isinstance(vars(owner).get(name), staticmethod)
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def _wrap_add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--speculative-model`` to the command line.

    Why: `EngineArgs` has no field for it, and vLLM's parser has no hook for plugins.
    Upstream: patches/vllm-0.32.0/0001. Remove when: plugins can register speculative methods.
    """

    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        from vllm_lookahead.cli_args import SpeculativeModelAction

        # Whichever of the two came last would win in silence. argparse has no public way to
        # exclude an argument that exists already.
        group = parser.add_mutually_exclusive_group()
        spec_method = parser._option_string_actions.get("--spec-method")
        if spec_method is not None:
            group._group_actions.append(spec_method)
            spec_method.choices = [*(spec_method.choices or ()), METHOD]
        group.add_argument(
            "--speculative-model",
            action=SpeculativeModelAction,
            metavar="[lookahead]",
            help="Use lookahead decoding (vllm-lookahead); its parameters go beside "
            '"method": "lookahead" in --speculative-config.',
        )
        return parser

    return add_cli_args


def _wrap_create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accept the method ``lookahead``.

    Why: `SpeculativeConfig` allows a closed list of methods and forbids other keys.
    Upstream: patches/vllm-0.32.0/0001. Remove when: plugins can register speculative methods.
    """

    @functools.wraps(original)
    def create_speculative_config(
        self: EngineArgs,
        target_model_config: ModelConfig,
        target_parallel_config: ParallelConfig,
    ) -> SpeculativeConfig | None:
        parameters = lookahead_parameters(self.spec_method, self.speculative_config)
        if parameters is None:
            return original(self, target_model_config, target_parallel_config)
        return _configure(self, parameters, target_model_config, target_parallel_config)

    return create_speculative_config


def _wrap_validate_spec_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``min_p`` and ``logit_bias`` through for lookahead, and check what a request asks of it.

    Why: vLLM's rejection sampler can't apply them; lookahead samples with vLLM's `Sampler`. And a
    bad ``extra_args["lookahead"]`` is to be the client's error (HTTP 400), not the worker's.
    Upstream: patches/vllm-0.32.0/0001. Remove when: plugins can register speculative methods.
    """

    @functools.wraps(original)
    def validate(self: SamplingParams, speculative_config: SpeculativeConfig | None) -> None:
        if speculative_config is None:
            return original(self, speculative_config)
        from vllm.exceptions import VLLMValidationError

        from vllm_lookahead.engine.speculative import LookaheadSpeculativeConfig

        if not isinstance(speculative_config, LookaheadSpeculativeConfig):
            return original(self, speculative_config)
        config = LookaheadConfig.from_mapping(speculative_config.lookahead)
        try:
            config_of_request(config, self.extra_args)
        except LookaheadConfigError as error:
            raise VLLMValidationError(str(error)) from error

    return validate


def lookahead_parameters(
    spec_method: str | None, speculative_config: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Parameters beside the method if it is ``lookahead``, None if it is another.

    Raises:
        LookaheadConfigError: both places name a method, and one of them is lookahead; or the
            method is misspelt.
    """
    values = {key.replace("-", "_"): value for key, value in (speculative_config or {}).items()}
    method = values.pop("method", None)
    if spec_method not in METHOD_SPELLINGS and method not in METHOD_SPELLINGS:
        if difflib.get_close_matches(str(method).lower(), METHOD_SPELLINGS, n=1, cutoff=0.8):
            raise LookaheadConfigError(
                f"unknown speculative method {method!r}; did you mean {METHOD!r}?"
            )
        return None
    if (
        spec_method is not None
        and method is not None
        and {spec_method, method} - {*METHOD_SPELLINGS}
    ):
        flag = "--speculative-model" if spec_method in METHOD_SPELLINGS else "--spec-method"
        raise LookaheadConfigError(
            f"{flag} names {spec_method!r} and --speculative-config names the method "
            f"{method!r}: drop one of them."
        )
    if "num_speculative_tokens" in values:
        raise LookaheadConfigError(
            "num_speculative_tokens follows from the n-gram size with the method 'lookahead' "
            "(it is ngram_size - 1): set ngram_size in --speculative-config instead."
        )
    return values


def _configure(
    args: EngineArgs,
    parameters: Mapping[str, Any],
    model_config: ModelConfig,
    parallel_config: ParallelConfig,
) -> SpeculativeConfig:
    """Point vLLM's own settings at lookahead's classes; everything is refused or set here."""
    reason = unsupported_vllm(vllm_version())
    if reason is not None:
        raise RuntimeError(reason)
    # Only now: another vLLM may lack what these import.
    from vllm_lookahead.engine.speculative import LookaheadSpeculativeConfig
    from vllm_lookahead.support import refusals

    config = LookaheadConfig.from_mapping(parameters)
    make_custom_sources(config)
    reasons = refusals(args, model_config)
    if reasons:
        raise ValueError(f"Lookahead decoding can't run here. {' '.join(reasons)}")
    parallel_config.worker_cls = WORKER
    args.scheduler_cls = SCHEDULER
    return LookaheadSpeculativeConfig(
        method="custom_class",
        model=PROPOSER,
        num_speculative_tokens=config.largest.num_draft_tokens,
        target_model_config=model_config,
        target_parallel_config=parallel_config,
        lookahead=config.to_json(),
    )
