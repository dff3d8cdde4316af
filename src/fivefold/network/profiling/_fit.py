"""Alpha and beta from times over sizes: a line that no outlier bends.

T(n) = alpha + beta n. Beta is the median slope over all pairs of sizes in the upper half, where
bandwidth dominates (Theil and Sen); alpha is what the smallest sizes take beyond beta. On data
that lie on a line this is that line. Where a link lets a burst through before it is slow, as
token buckets do, it is still the rate of the link, and the residuals show the burst.

References:
    P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 1968.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.errors import DataError


class LineFit(NamedTuple):
    """A fitted link.

    Attributes:
        alpha_s: Time of an empty message.
        beta_s_per_byte: Time of each further byte.
        residuals: (measured - fitted) / the larger of both, of each size: from -1 to 1.

    Examples:
        >>> LineFit(1e-6, 1e-9, ()).beta_s_per_byte
        1e-09
    """

    alpha_s: float
    beta_s_per_byte: float
    residuals: tuple[float, ...]


def fit_line(sizes_bytes: npt.ArrayLike, times_s: npt.ArrayLike) -> LineFit:
    """Fit alpha and beta.

    Args:
        sizes_bytes: At least two different sizes.
        times_s: Time of each.

    Returns:
        Alpha (at least 0), beta (at least 0) and relative residuals.

    Raises:
        DataError: There are fewer than two sizes, or a time is not a number above zero.

    Examples:
        >>> fit = fit_line([0, 1000, 2000, 4000], [1e-6, 2e-6, 3e-6, 5e-6])
        >>> round(fit.alpha_s, 12), round(fit.beta_s_per_byte, 15)
        (1e-06, 1e-09)
    """
    sizes, times = np.asarray(sizes_bytes, np.float64), np.asarray(times_s, np.float64)
    if sizes.shape != times.shape or np.unique(sizes).size < 2:
        raise DataError(
            f"a line needs times at two different sizes or more; got {sizes.tolist()}",
            hint="measure for example 1 KB and 1 MB",
        )
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise DataError(f"times must be more than zero; got {times.tolist()}")
    order = np.argsort(sizes)
    sizes, times = sizes[order], times[order]
    upper = slice(min(sizes.size // 2, sizes.size - 2), None)
    beta = _median_slope(sizes[upper], times[upper])
    if beta <= 0.0:  # noise was larger than the differences: the whole range is the longest lever
        beta = max(0.0, float((times[-1] - times[0]) / (sizes[-1] - sizes[0])))
    small = times[: max(1, sizes.size // 3)] - beta * sizes[: max(1, sizes.size // 3)]
    alpha = max(0.0, float(np.median(small)))
    fitted = alpha + beta * sizes
    residuals = np.empty(sizes.size)
    residuals[order] = (times - fitted) / np.maximum(times, fitted)
    return LineFit(alpha, beta, tuple(residuals.tolist()))


def _median_slope(sizes: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> float:
    low, high = np.triu_indices(sizes.size, 1)
    apart = sizes[high] > sizes[low]
    low, high = low[apart], high[apart]
    slopes = (times[high] - times[low]) / (sizes[high] - sizes[low])
    # Long levers are worth more: each slope counts by the distance that it spans.
    order = np.argsort(slopes)
    weights = np.cumsum((sizes[high] - sizes[low])[order])
    middle = int(np.searchsorted(weights, weights[-1] / 2.0))
    return float(slopes[order][middle])
