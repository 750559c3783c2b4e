"""Sampling of the text that the model writes at start-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import SamplerOutput

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata


class TextSampler:
    """Stands in for vLLM's `Sampler` while texts are written.

    One random number per text instead of one per token of the vocabulary: for a small model on a
    CPU, vLLM's noise takes longer than the model.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        """
        Args:
            temperature: over 0.
            seed: ranks with the same seed and the same logits draw the same tokens.
        """
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Draw a token for each row, by inversion.

        Args:
            logits: [num_reqs, vocab]
            metadata: not looked at: all texts are sampled alike.
        """
        bounds = (logits.float() / self._temperature).softmax(dim=-1).cumsum(dim=-1)
        draws = torch.rand(len(logits), 1, generator=self._generator) * bounds[:, -1:]
        # The first token whose bound is beyond the draw; rounding may put that on the last bound.
        tokens = torch.searchsorted(bounds, draws, right=True).clamp_(max=logits.shape[1] - 1)
        return SamplerOutput(tokens.to(torch.int32), None)
