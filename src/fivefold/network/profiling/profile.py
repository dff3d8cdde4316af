"""Alpha and beta of measured links, and the topology that explains them.

T(n) = alpha + beta n is a line that no outlier bends: beta is the median slope over pairs of the
larger sizes, where bandwidth dominates (P. K. Sen, JASA 1968); alpha is what the smallest take
beyond it. Where token buckets let a burst through, the residuals show it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.errors import DataError
from fivefold.measured import NOISE
from fivefold.network.topology import Link, Node, Topology

FloatArray = npt.NDArray[np.float64]
# A rank that sends to all at once and gets less than this times its best pair has one port.
_ONE_PORT = 1.5
_NEAR_BEST = 0.9


class LineFit(NamedTuple):
    """Fitted lines."""

    alpha_s: FloatArray  # [...]
    beta_s_per_byte: FloatArray  # [...]
    residuals: FloatArray  # (measured - fitted) / the larger of both; [..., sizes]


def fit_line(sizes_bytes: npt.ArrayLike, times_s: npt.ArrayLike) -> LineFit:
    """Fit alpha and beta, both at least 0, to times [..., sizes] at two sizes or more, ascending.

    Examples:
        >>> fit = fit_line([0, 1000, 2000, 4000], [1e-6, 2e-6, 3e-6, 5e-6])
        >>> round(float(fit.alpha_s), 12), round(float(fit.beta_s_per_byte), 15)
        (1e-06, 1e-09)
    """
    sizes, times = np.asarray(sizes_bytes, np.float64), np.asarray(times_s, np.float64)
    if sizes.ndim != 1 or sizes.shape != times.shape[-1:] or sizes.size < 2:
        raise DataError(
            f"a line needs times at two different sizes or more; got {sizes.tolist()}",
            hint="measure for example 1 KB and 1 MB",
        )
    if not (np.diff(sizes) > 0).all():
        raise DataError(f"sizes must rise; got {sizes.tolist()}", hint="give each size once")
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise DataError(f"times must be more than zero; got {times.tolist()}")
    upper = min(sizes.size // 2, sizes.size - 2)
    low, high = np.triu_indices(sizes.size - upper, 1) + np.array(upper)
    span = sizes[high] - sizes[low]
    slopes = (times[..., high] - times[..., low]) / span
    # Long levers are worth more: each slope counts by the distance that it spans.
    order = np.argsort(slopes, axis=-1)
    weights = np.cumsum(span[order], axis=-1)
    middle = np.argmax(weights >= weights[..., -1:] / 2.0, axis=-1, keepdims=True)
    beta = np.take_along_axis(np.take_along_axis(slopes, order, -1), middle, -1)[..., 0]
    # Where noise was larger than the differences the whole range is the longest lever.
    whole = (times[..., -1] - times[..., 0]) / (sizes[-1] - sizes[0])
    beta = np.where(beta > 0.0, beta, np.maximum(whole, 0.0))
    small = slice(max(1, sizes.size // 3))
    beyond = times[..., small] - beta[..., None] * sizes[small]
    alpha = np.maximum(0.0, np.median(beyond, axis=-1))
    fitted = alpha[..., None] + beta[..., None] * sizes
    return LineFit(alpha, beta, (times - fitted) / np.maximum(times, fitted))


@dataclass(frozen=True, eq=False, kw_only=True)
class Contention:
    """Rates with several transfers at once, bytes per second.

    Attributes:
        out_bytes_per_s: What each rank sends when it sends to all others at once; float64 [ranks].
        in_bytes_per_s: What each rank receives when all others send to it; float64 [ranks].
        all_bytes_per_s: What each rank sends when all send to all.
        host_out_bytes_per_s: What each host sends to the others when all its ranks do; by host.

    Raises:
        DataError: A rate is not above 0 and finite.
    """

    out_bytes_per_s: FloatArray
    in_bytes_per_s: FloatArray
    all_bytes_per_s: float
    host_out_bytes_per_s: Mapping[str, float]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            rates = np.array([*value.values()] if isinstance(value, Mapping) else value, np.float64)
            if not (np.isfinite(rates).all() and (rates > 0).all()):
                raise DataError(
                    f"{field.name} is {rates.tolist()}",
                    hint="a rate is above 0 and finite: measure again",
                )


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """Alpha and beta between each pair of ranks, alone and under contention.

    Attributes:
        hosts: Host of each rank.
        backend: What carried the data: ``"gloo"``, ``"nccl"``, ...
        sizes_bytes: Message sizes, ascending.
        times_s: Median time from sender to receiver; float64 [ranks, ranks, sizes], NaN on the
            diagonal.
        contention: Rates under contention; None where they were not measured.

    Raises:
        DataError: The arrays do not fit together, or a time is not above 0 and finite.

    Examples:
        >>> sizes = (1000, 1_000_000)
        >>> times = np.full((2, 2, 2), np.nan)
        >>> times[0, 1] = times[1, 0] = [2e-6, 1.001e-3]
        >>> profile = Profile(hosts=("a", "b"), backend="gloo", sizes_bytes=sizes, times_s=times)
        >>> float(round(profile.alpha_s[0, 1], 9)), round(1 / profile.beta_s_per_byte[0, 1])
        (1e-06, 1000000000)
    """

    hosts: tuple[str, ...]
    backend: str
    sizes_bytes: tuple[int, ...]
    times_s: FloatArray
    contention: Contention | None = None

    def __post_init__(self) -> None:
        shape = (self.num_ranks, self.num_ranks, len(self.sizes_bytes))
        if self.times_s.shape != shape:
            raise DataError(f"times_s must have shape {shape}; got {self.times_s.shape}")
        _ = self._fit  # refuses data that no line fits

    @cached_property
    def _fit(self) -> LineFit:
        apart = ~np.eye(self.num_ranks, dtype=bool)
        times = np.where(apart[..., None], self.times_s, 1.0)
        fit = fit_line(self.sizes_bytes, times)
        # A line that rises by less than noise has no rate: its reciprocal would be any number.
        rise_s = fit.beta_s_per_byte * (self.sizes_bytes[-1] - self.sizes_bytes[0])
        seen = apart & (rise_s >= NOISE * times.max(axis=-1))
        return LineFit(
            fit.alpha_s * apart, fit.beta_s_per_byte * seen, fit.residuals * apart[..., None]
        )

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that were measured."""
        return len(self.hosts)

    @property
    def alpha_s(self) -> FloatArray:
        """Latency from each rank to each other; float64 [ranks, ranks]."""
        return self._fit.alpha_s

    @property
    def beta_s_per_byte(self) -> FloatArray:
        """Time of a byte from each rank to each other; float64 [ranks, ranks]."""
        return self._fit.beta_s_per_byte

    @property
    def residuals(self) -> FloatArray:
        """(measured - fitted) / the larger of both; float64 [ranks, ranks, sizes]."""
        return self._fit.residuals

    @property
    def rates_bytes_per_s(self) -> FloatArray:
        """One over beta; ``inf`` where times grew by noise only; float64 [ranks, ranks]."""
        with np.errstate(divide="ignore"):
            return 1.0 / self.beta_s_per_byte

    def shares_one_port(self) -> bool:
        """Return whether a rank's transfers share its port, rather than have links of their own.

        Decided by contention: a rank that sends to all others at once is as fast as to one.
        Without that measurement, or with two ranks, the answer is True.
        """
        if self.contention is None or self.num_ranks < 3:
            return True
        itself = np.eye(self.num_ranks, dtype=bool)
        best = np.where(itself, 0.0, self.usable_rates_bytes_per_s)
        gain_out = self.contention.out_bytes_per_s / best.max(axis=1)
        gain_in = self.contention.in_bytes_per_s / best.max(axis=0)
        return float(np.median(np.concatenate([gain_out, gain_in]))) < _ONE_PORT

    @property
    def usable_rates_bytes_per_s(self) -> FloatArray:
        """One over beta, or where times grew by noise only, the largest size over its time."""
        with np.errstate(divide="ignore", invalid="ignore"):  # what takes no time to itself
            bounds = self.sizes_bytes[-1] / self.times_s[:, :, -1]
        return np.where(np.isinf(self.rates_bytes_per_s), bounds, self.rates_bytes_per_s)

    def to_topology(self, name: str = "profiled") -> Topology:
        """Return the topology that explains the measurements.

        One rank a host, or all on one: ranks that share one port are joined by a switch, each by
        the rate of its port; others by a direct link for each ordered pair. Several ranks on
        several hosts: direct links within each host, and a network card for each host, which its
        ranks share, joined by a switch.

        Returns:
            The topology; its source says how it came about. Where times grew by noise only,
            the link gets the largest size over its time, which is less than its rate.
        """
        kind: Any = "gpu" if self.backend == "nccl" else "cpu"
        nodes = [Node(f"rank{r}", kind, host=host) for r, host in enumerate(self.hosts)]
        several = len(set(self.hosts)) > 1
        if several and len(set(self.hosts)) < self.num_ranks:
            switches, links = self._joined_hosts()
            how = "direct links inside hosts, one network card a host"
        elif self.num_ranks > 2 and self.shares_one_port():
            pairs = self._to_hubs(["switch"] * self.num_ranks, ~np.eye(self.num_ranks, dtype=bool))
            inside = None if several else self.hosts[0]  # else nothing would join its ranks
            switches = [Node("switch", "switch", host=inside)]
            links = list(itertools.chain.from_iterable(pairs))
            how = "one port a rank on one switch"
        else:
            switches, links = [], self._direct(range(self.num_ranks))
            how = "a direct link for each ordered pair"
        source = f"measured with {self.backend} between {self.num_ranks} ranks; {how}"
        unseen = int(np.isinf(self.rates_bytes_per_s).sum()) - self.num_ranks  # the diagonal is
        if unseen:
            source += f"; {unseen} rates are lower bounds: measure with larger sizes"
        return Topology(name, [*nodes, *switches], links, source=source)

    def _direct(self, ranks: Sequence[int]) -> list[Link]:
        rates, alphas = self.usable_rates_bytes_per_s, self.alpha_s
        return [
            _link(f"rank{a}", f"rank{b}", rates[a, b], alphas[a, b])
            for a, b in itertools.permutations(ranks, 2)
        ]

    def _to_hubs(self, hubs: Sequence[str], partners: npt.NDArray[np.bool_]) -> list[list[Link]]:
        """Return each rank's link to its hub and back, by what it reaches with its partners."""
        rates = self.usable_rates_bytes_per_s
        rise_s, fall_s = split_latencies(np.where(partners, self.alpha_s, np.nan))
        return [
            [
                _link(f"rank{rank}", hub, _best(rates[rank, partners[rank]]), rise_s[rank]),
                _link(hub, f"rank{rank}", _best(rates[partners[:, rank], rank]), fall_s[rank]),
            ]
            for rank, hub in enumerate(hubs)
        ]

    def _joined_hosts(self) -> tuple[list[Node], list[Link]]:
        hosts = np.array(self.hosts)
        pairs = self._to_hubs([f"{host} card" for host in hosts], hosts[:, None] != hosts[None, :])
        nodes, links = [Node("switch", "switch")], []
        for host in dict.fromkeys(self.hosts):
            ranks, card = np.flatnonzero(hosts == host).tolist(), f"{host} card"
            nodes.append(Node(card, "nic", host=host))
            links += [*self._direct(ranks), *(link for rank in ranks for link in pairs[rank])]
            ups, downs = (
                [pairs[rank][way].bandwidth_bytes_per_s for rank in ranks] for way in (0, 1)
            )
            shared = None if self.contention is None else self.contention.host_out_bytes_per_s
            port = max([*ups, shared[host]] if shared else ups)
            links.append(_link(card, "switch", port))
            links.append(_link("switch", card, max(port, *downs)))
        return nodes, links

    def to_dict(self) -> dict[str, Any]:
        """Return all that was measured and fitted, as JSON can hold it."""
        crowded = None
        if self.contention is not None:
            crowded = dataclasses.asdict(self.contention)
            for key in ("out_bytes_per_s", "in_bytes_per_s"):
                crowded[key] = crowded[key].tolist()
        return {
            "hosts": list(self.hosts),
            "backend": self.backend,
            "sizes_bytes": list(self.sizes_bytes),
            "times_s": np.nan_to_num(self.times_s).tolist(),
            "alpha_s": self.alpha_s.tolist(),
            "beta_s_per_byte": self.beta_s_per_byte.tolist(),
            "contention": crowded,
        }


def _link(source: str, target: str, rate: float, latency_s: float = 0.0) -> Link:
    return Link(source, target, bandwidth_bytes_per_s=rate, latency_s=latency_s)


def _best(rates: FloatArray) -> float:
    """Return the port's rate: the middle of the pairs that no slower partner held back."""
    return float(np.median(rates[rates >= _NEAR_BEST * rates.max()]))


def split_latencies(alpha_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Share each pair's latency out: least squares of alpha[a, b] = up[a] + down[b]."""
    count = len(alpha_s)
    known = ~np.isnan(alpha_s) & ~np.eye(count, dtype=bool)
    rows, columns = np.nonzero(known)
    matrix = np.zeros((rows.size, 2 * count))
    matrix[np.arange(rows.size), rows] = 1.0
    matrix[np.arange(rows.size), count + columns] = 1.0
    # Of all solutions the smallest: it halves what only the sum is known of.
    found = np.linalg.lstsq(matrix, alpha_s[known], rcond=None)[0]
    found = np.maximum(found, 0.0)
    return found[:count], found[count:]
