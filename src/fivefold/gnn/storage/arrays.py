"""Names of array types that the whole package writes out in signatures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ids = NDArray[np.int64]  # ids, counts, places
Bytes = NDArray[np.uint8]
