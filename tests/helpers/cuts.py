"""A run that ends early, as one that is killed, and can go on."""

from __future__ import annotations

import json

from xmc_stream.runtime.job import Notes, Receipt


class CutError(Exception):
    """The run ends here."""


class CutLedger(Notes):
    """Ends the run after so many jobs (`left`; 0: never). Receipts are as they come out of a file."""

    left = 0

    def add(self, key: str, receipt: Receipt) -> None:
        super().add(key, json.loads(json.dumps(receipt)))
        self.left -= 1
        if self.left == 0:
            raise CutError
