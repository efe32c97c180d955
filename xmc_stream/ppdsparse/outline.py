"""What a run is about to do, in words, and where each phase lies in the whole, for those who watch."""

from __future__ import annotations

from collections.abc import Mapping

from xmc_stream.ppdsparse.parameters import PPDSparseParameters

_ALL_ROUNDS, _WRITING = 0.85, 0.97  # of a run: where rounds of every class end, and where the model is written

Span = tuple[float, float]


class Outline:
    """A run's phases. seconds: what each is foreseen to take, by the beginning of its jobs' keys."""

    def __init__(self, parameters: PPDSparseParameters, seconds: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._spans = _spans(parameters, dict(seconds))

    def span(self, phase: str) -> Span | None:
        """From where to where a phase takes the whole run; None where nobody knows how many rounds there will be."""
        return self._spans.get(phase)

    def words(self, doing: str, round_: int) -> str:
        """What a round does, and which one it is."""
        p, common = self._parameters, self._parameters.common_rounds
        if common is None:
            return f"{doing}, round {round_ + 1} of as many as it takes"
        if round_ < common:
            return f"{doing}, round {round_ + 1} of {common}"
        return f"{doing}, round {round_ + 1} of at most {p.max_rounds}, of classes far from their optimum"


def part_of(span: Span | None, part: int, parts: int) -> Span | None:
    """One of several equal parts."""
    if span is None:
        return None
    begin, end = span
    return begin + (end - begin) * part / parts, begin + (end - begin) * (part + 1) / parts


def _spans(p: PPDSparseParameters, seconds: dict[str, float]) -> dict[str, Span | None]:
    """Rounds that only some classes need come behind the others."""
    if p.common_rounds is None or p.max_rounds is None:
        return {}
    last = seconds.pop("finalise", 0.0)
    before = max(sum(seconds.values()), 1e-9)
    rounds = [name for r in range(p.max_rounds) for name in (f"solve/{r}", f"search/{r + 1}")]
    ends = p.all_rows and p.max_rounds == 1  # nothing is searched
    more = [name for name in rounds if name not in seconds and not ends]
    end, written = (_ALL_ROUNDS, _WRITING) if more else (before / (before + last),) * 2
    spans: dict[str, Span | None] = {}
    at = 0.0
    for name, of in seconds.items():
        spans[name] = end * at / before, end * (at + of) / before
        at += of
    for i, name in enumerate(more):
        spans[name] = part_of((end, written), i, len(more))
    return {**spans, "finalise": (written, 1.0)}
