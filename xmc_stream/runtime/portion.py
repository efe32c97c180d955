"""How long a job goes on before it leaves what it has done: a stop costs no more than that."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 10.0  # of the processor, of all threads; what a job leaves is written after them


class Portion:
    """What one job takes of a long piece of work that may end anywhere: it asks after each bit of it whether to end.

    Made when the first bit begins: what the job reads before is not a bit. Seconds are those of the processor in the whole
    process, unless `clock` has others: jobs beside each other take SECONDS together.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._longest = 0.0

    def done(self) -> bool:
        """Whether another bit, as long as the longest so far, would take longer than a job should."""
        now = self._clock()
        self._longest, self._last = max(self._longest, now - self._last), now
        return now - self._began + self._longest > SECONDS
