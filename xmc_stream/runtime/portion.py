"""How long a job goes on before it leaves what it has done: a stop costs no more than that."""

from __future__ import annotations

import time

SECONDS = 10.0  # of the processor, of all threads; what a job leaves is written after them


class Portion:
    """What one job takes of a long piece of work that may end anywhere: it asks after each bit of it whether to end.

    Made when the first bit begins: what the job reads before is not a bit. Seconds are those of the processor in the whole
    process: jobs beside each other take SECONDS together.
    """

    def __init__(self) -> None:
        self._began = self._last = time.process_time()
        self._longest = 0.0

    def done(self) -> bool:
        """Whether another bit, as long as the longest so far, would take longer than a job should."""
        now = time.process_time()
        self._longest, self._last = max(self._longest, now - self._last), now
        return now - self._began + self._longest > SECONDS
