"""Counters of what lookahead fed and got."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class LookaheadStats:
    """Cumulative counters of a worker since its start.

    Step compression ratio S = ``tokens / steps``.
    """

    steps: int = 0
    """Decode steps, counted per request."""
    tokens: int = 0
    """Tokens emitted by them, bonus tokens included (also any past a stop)."""
    fed: int = 0
    """Tree nodes fed by them."""
    plain: int = 0
    """Steps that fed the root and nothing else."""
    windows: int = 0
    """Steps that fed the lookahead window."""
    off_primary: int = 0
    """Steps whose accepted path left the primary candidate."""
    accepted: list[int] = field(default_factory=list)
    """accepted[k]: steps that accepted k draft tokens."""

    def observe(self, emitted: int, fed: int, off_primary: bool, window: bool) -> None:
        """Count one decode step of one request."""
        self.steps += 1
        self.tokens += emitted
        self.fed += fed
        self.plain += fed == 1
        self.windows += window
        self.off_primary += off_primary
        self.accepted.extend([0] * (emitted - len(self.accepted)))
        self.accepted[emitted - 1] += 1

    def to_json(self) -> dict[str, int | list[int]]:
        """JSON-able copy."""
        return asdict(self)
