"""What all jobs of a run share, and what a search hands to the solves after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from xmc_stream.linear.weights import Unit
from xmc_stream.ppdsparse.candidates import CandidateFile, CandidateRows
from xmc_stream.ppdsparse.parameters import EXACT, PPDSparseParameters
from xmc_stream.ppdsparse.weights import LossWeights
from xmc_stream.runtime.plan import MemoryPlan


@dataclass(frozen=True)
class Problem:
    """The same for all jobs of a run. data: path of the dataset; weights: of rows and classes in the loss."""

    data: str
    parameters: PPDSparseParameters
    seed: int
    plan: MemoryPlan
    weights: LossWeights


class Share(NamedTuple):
    """Classes [first, last) of a unit, or all of them, that are a solve job."""

    first: int
    last: int
    unit: Unit

    @property
    def whole(self) -> bool:
        """Whether it is the unit."""
        return (self.first, self.last) == self.unit

    @property
    def name(self) -> str:
        """In keys of jobs and names of states: the unit's, or with the classes "0.250-500"."""
        return self.unit.name if self.whole else f"{self.unit.name}.{self.first}-{self.last}"


@dataclass(frozen=True)
class Found:
    """What a search found. kind: of the search; n_classes: how many classes have violators."""

    files: tuple[CandidateFile, ...] = ()
    kind: str = EXACT
    n_classes: int = 0

    def of(self, first: int, last: int) -> Found:
        """The files that hold some of classes [first, last)."""
        mine = tuple(file for file in self.files if file.first < last and file.last > first)
        return Found(mine, self.kind, self.n_classes)

    def open(self, n_samples: int) -> list[CandidateRows]:
        """What the files hold, of the rows of so many samples."""
        return [file.open(n_samples) for file in self.files]
