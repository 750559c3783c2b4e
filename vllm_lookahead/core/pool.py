"""The n-gram pool of one sequence (paper, section 3.1)."""

from __future__ import annotations

from typing import NamedTuple

Ngram = tuple[int, ...]


class Entry(NamedTuple):
    """What is known of a pooled n-gram beside its tokens."""

    previous: int
    """The token before the key, -1 if unknown."""
    guessed: bool
    """Whether it comes from the lookahead window rather than from the text."""


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
        # The order of keys, and of each key's values, is that of their last insertion.
        self._values: dict[int, dict[Ngram, Entry]] = {}

    def __len__(self) -> int:
        """Number of n-grams held."""
        return self._size

    def insert(self, key: int, value: Ngram, previous: int = -1, guessed: bool = False) -> None:
        """Put ``value`` first among those of ``key``; a repeated one moves up.

        Raises:
            ValueError: ``value`` has not ``value_size`` tokens.
        """
        if len(value) != self._value_size:
            raise ValueError(f"n-gram value has {len(value)} tokens, not {self._value_size}")
        values = self._values.pop(key, None)
        if values is None:
            values = {}
        self._values[key] = values
        if values.pop(value, None) is None:
            self._size += 1
        values[value] = Entry(previous, guessed)
        if len(values) > self._per_key:
            del values[next(iter(values))]
            self._size -= 1
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
                previous = tokens[end - size - 1] if end > size else -1
                self.insert(tokens[end - size], value, previous)

    def lookup(self, key: int) -> list[tuple[Ngram, Entry]]:
        """Values of ``key``, newest first."""
        values = self._values.get(key)
        return list(reversed(values.items())) if values else []
