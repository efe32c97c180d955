"""All compilation options in one place.

nogil: kernels run beside each other in one process. cache: a process loads what another compiled. No fastmath: a sum
must round the same in a dense and in a scattered path, so multiply and add are never fused and never reordered.
"""

from __future__ import annotations

from numba import njit

kernel = njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
