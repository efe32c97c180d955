"""Several settings on the same rows: each begins from the weights of a neighbour, and takes fewer rounds than by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from xmc_stream.methods.contract import Step
from xmc_stream.ppdsparse.parameters import PPDSparseParameters

_TERMS = ("lam", "tau", "C")
_APART = ("guide", "implied", "prune", "weight_type")  # the labels' own weights do not depend on these until a run ends
_LEAST = 1e-6  # of a weight, where ratios are compared: 0 has none


def path_of(settings: Sequence[PPDSparseParameters]) -> list[Step]:
    """A tree of warm starts among settings that differ in lam, tau, C and _APART alone; others begin by themselves.

    C grows along it, and lam and tau fall, as w then need not shrink (see `PPDSparseParameters.warm`). A setting begins
    from the nearest one before it that has it so.
    """

    def place(i: int) -> tuple[float, ...]:
        lam, tau, C = (_value(settings[i], name) for name in _TERMS)
        return C, -lam, -tau, settings[i].prune or 0.0

    order = sorted(range(len(settings)), key=place)
    steps: list[Step] = []
    for i in order:
        mine = settings[i]
        starts = [step.setting for step in steps if _goes_on(settings[step.setting], mine)]
        start = min(starts, key=lambda j: _distance(settings[j], mine), default=None)
        steps.append(Step(i, start))
    return steps


def _goes_on(start: PPDSparseParameters, setting: PPDSparseParameters) -> bool:
    """Whether a setting takes less from the weights of another: they differ in numbers alone, and w does not shrink."""
    before, now = ({k: v for k, v in asdict(p).items() if k not in (*_TERMS, *_APART)} for p in (start, setting))
    (lam, tau, C), (lam_now, tau_now, C_now) = ([_value(p, name) for name in _TERMS] for p in (start, setting))
    grows = lam_now * C <= lam * C_now and tau_now * C <= tau * C_now
    takes = setting.loss == "squared_hinge" and setting.common_rounds is not None
    return before == now and takes and grows and (start.prune or 0.0) <= (setting.prune or 0.0)


def _distance(start: PPDSparseParameters, setting: PPDSparseParameters) -> float:
    ratios = (max(_value(setting, name), _LEAST) / max(_value(start, name), _LEAST) for name in _TERMS)
    return sum(abs(math.log(ratio)) for ratio in ratios)


def _value(p: PPDSparseParameters, name: str) -> float:
    """lam, tau or C; a C that is not given is 1 at least."""
    value = getattr(p, name)
    return 1.0 if value is None else float(value)
