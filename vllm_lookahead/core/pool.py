"""The n-gram pool of one sequence (paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable

Ngram = tuple[int, ...]


class NgramPool:
    """Newest distinct n-grams per key token, bounded in number.

    An n-gram is (key, *value): `value` are the ``value_size`` tokens that followed ``key``.
    """

    def __init__(self, value_size: int, per_key: int, capacity: int) -> None:
        """
        Args:
            value_size: tokens of a value, N - 1.
            per_key: values kept per key, newest first.
            capacity: values kept in all; beyond it the keys inserted longest ago leave whole.
        """
        self._value_size = value_size
        # A key larger than the pool would be evicted together with the value just inserted.
        self._per_key = min(per_key, capacity)
        self._capacity = capacity
        self._size = 0
        # The keys' order is that of their last insertion.
        self._values: dict[int, list[Ngram]] = {}

    def __len__(self) -> int:
        """Number of n-grams held."""
        return self._size

    def insert(self, key: int, value: Ngram) -> None:
        """Put ``value`` first among those of ``key``; a repeated one moves up.

        Raises:
            ValueError: ``value`` has not ``value_size`` tokens.
        """
        if len(value) != self._value_size:
            raise ValueError(f"n-gram value has {len(value)} tokens, not {self._value_size}")
        values = self._values.pop(key, None)
        if values is None:
            self._values[key] = [value]
            self._size += 1
        else:
            self._values[key] = values
            if values[0] != value:
                self._put_first(values, value)
        while self._size > self._capacity:
            oldest = next(iter(self._values))
            self._size -= len(self._values.pop(oldest))

    def insert_text(
        self, tokens: list[int], first: int, last: int, vocab_size: int | None = None
    ) -> None:
        """Insert every n-gram of ``tokens`` whose final token lies in [first, last).

        Values with a token outside of the vocabulary, such as an image's placeholder, are left
        out: no output can match them.
        """
        size = self._value_size
        for end in range(max(first, size), last):
            value = tuple(tokens[end - size + 1 : end + 1])
            if vocab_size is None or max(value) < vocab_size:
                self.insert(tokens[end - size], value)

    def lookup(self, key: int, limit: int) -> Iterable[Ngram]:
        """Values of ``key``, newest first, at most ``limit``."""
        return self._values.get(key, ())[:limit]

    def _put_first(self, values: list[Ngram], value: Ngram) -> None:
        if value in values:
            values.remove(value)
        elif len(values) == self._per_key:
            values.pop()
        else:
            self._size += 1
        values.insert(0, value)
