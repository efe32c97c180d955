"""AnnData with classes of several types."""

from __future__ import annotations

from typing import Any

import numpy as np


def annotated(ad: Any, X: Any, y: Any, names: str = "defghi", first: int = 0, **more: Any) -> Any:
    """An AnnData with classes as category, string and integer."""
    import pandas as pd

    words = np.array(["red", "green", "blue", "ash tree"])[y]
    numbers = np.array([30, 4, 200, -1])[y]
    obs = pd.DataFrame(
        {"kind": pd.Categorical(words, ["red", "green", "blue", "ash tree"]), "word": words, "number": numbers},
        index=[f"cell {i}" for i in range(X.shape[0])],
    )
    var = pd.DataFrame(index=[f"gene {first + j}" for j in range(X.shape[1])])
    return ad.AnnData(X, obs=obs, var=var, **more)
