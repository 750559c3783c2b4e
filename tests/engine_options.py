"""The smallest engine that tests start, as keyword arguments and as flags of `vllm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
}


def engine_args(model: Path, **changes: Any) -> EngineArgs:
    """`EngineArgs` for a tiny model; ``changes`` replace or add arguments."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**{"model": str(model), **OPTIONS, **changes})


def serve_flags() -> list[str]:
    """`OPTIONS` on the command line."""
    flags = []
    for name, value in OPTIONS.items():
        flags += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name}={value}"]
    return flags
