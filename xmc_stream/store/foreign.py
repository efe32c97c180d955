"""Zarr folders that others wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmc_stream.errors import StoreError


def open_foreign(path: Path) -> Any:
    """A zarr group, of version 2 or 3, for reading. Raises StoreError where there is none."""
    import zarr

    try:
        return zarr.open_group(path, mode="r")
    except (FileNotFoundError, ValueError, KeyError, zarr.errors.GroupNotFoundError):
        raise StoreError(f"{path} is not a zarr group: check the name") from None
