"""The argmax of logits, against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_lookahead.engine.argmax import argmax_rows

HALVES = [torch.bfloat16, torch.float16]
ANY_BITS = st.integers(0, 0xFFFF)
"""Any float of 16 bits, as its bits: also zeros of both signs, infinities and NaNs."""
FEW_BITS = st.sampled_from([0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0])
ROWS = st.integers(1, 8).flatmap(
    lambda width: st.lists(
        st.lists(ANY_BITS | FEW_BITS, min_size=width, max_size=width), min_size=1, max_size=4
    )
)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@given(ROWS)
@example([[0x8000, 0x0000]])
@example([[0xBF80, 0xBF00, 0xC000]])
@example([[0x3F80, 0xFFC0, 0x7FC1]])
def test_argmax_of_16_bit_logits_is_that_of_torch(
    dtype: torch.dtype, rows: list[list[int]]
) -> None:
    logits = torch.from_numpy(np.array(rows, dtype=np.uint16).view(np.int16)).view(dtype)
    assert argmax_rows(logits).tolist() == logits.float().argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_argmax_of_a_vocabulary_is_that_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    # In bfloat16 many of them are equal.
    logits = torch.randn(5, 50_000).to(dtype)
    logits[1] -= 100
    assert argmax_rows(logits).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_rows_have_no_argmax(dtype: torch.dtype) -> None:
    assert argmax_rows(torch.empty(0, 7, dtype=dtype)).tolist() == []
