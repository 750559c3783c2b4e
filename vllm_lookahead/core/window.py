"""The 2-D lookahead window of one sequence (paper, section 3.1, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_lookahead.core.pool import Ngram


class LookaheadWindow:
    """N - 1 rows of Jacobi guesses, W columns wide.

    ``rows[0]`` holds columns 1 to W - 1 (column 0 is the root, which is no guess), the rows
    above hold W columns. A guess in row l, column i stands l + i positions after the root.
    A new window has row 0 only; each step adds a row until there are N - 1.
    """

    def __init__(self, width: int, ngram_size: int, guesses: Sequence[int], jacobi: bool) -> None:
        """
        Args:
            width: W, at least 1.
            ngram_size: N, at least 2.
            guesses: W - 1 tokens to start row 0 with.
            jacobi: keep row 0 aligned with the text after an acceptance (Jacobi decoding)
                instead of moving on by one column whatever was accepted.
        """
        if len(guesses) != width - 1:
            raise ValueError(f"a window of width {width} starts from {width - 1} guesses")
        self.width = width
        self._height = ngram_size - 1
        self._jacobi = jacobi
        self.rows: list[list[int]] = [list(guesses)]

    @property
    def size(self) -> int:
        """Tokens that the window feeds beside the root, nothing merged."""
        return len(self.rows) * self.width - 1

    @property
    def is_full(self) -> bool:
        """Whether all N - 1 rows are there, so that steps yield n-grams."""
        return len(self.rows) == self._height

    def advance(self, root: int, new_row: Sequence[int], accepted: int) -> list[tuple[int, Ngram]]:
        """Take the model's outputs at the last row; the window moves on by one row.

        Args:
            root: the token that was column 0 of row 0.
            new_row: argmax of the W outputs at the last row.
            accepted: draft tokens that the step accepted.

        Returns:
            The trajectory's n-grams as (key, value), none while the window fills.
        """
        new = [int(token) for token in new_row]
        if len(new) != self.width:
            raise ValueError(f"new row has {len(new)} tokens, not {self.width}")
        if not self.is_full:
            self.rows.append(new)
            return []
        keys = [root, *self.rows[0]]
        rows = [*self.rows[1:], new]
        ngrams = [(keys[i], tuple(row[i] for row in rows)) for i in range(self.width)]
        # The new root replaces column 0 of what is now row 0.
        rows[0] = self._realigned(rows[0], accepted) if self._jacobi else rows[0][1:]
        self.rows = rows
        return ngrams

    def _realigned(self, row: list[int], accepted: int) -> list[int]:
        guesses = row[1 + accepted :]
        return guesses + [row[-1]] * (self.width - 1 - len(guesses))

    def deepest_path(self) -> list[int]:
        """The window's longest root path, without the root: row 0, then the last column up."""
        if self.width == 1:
            return [row[0] for row in self.rows[1:]]
        return self.rows[0] + [row[-1] for row in self.rows[1:]]
