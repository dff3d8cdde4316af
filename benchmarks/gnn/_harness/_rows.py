"""From the answers of the workers to rows of the results file."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gnn._harness._settings import Setting
from benchmarks.results_file import BenchmarkRow, median_and_spread

__all__ = ["rows_of"]

OURS = "ours static"
AMPLIFICATION = 1.05
BLOW_UP = 2.1
OF_SEQUENTIAL = 0.9
Measured = dict[str, Any]


def rows_of(measured: Measured) -> list[BenchmarkRow]:
    """All rows of one setting."""
    setting = Setting(**measured["setting"])
    runs = {name: found for name, found in measured["runs"].items() if found}
    table = _Table(setting, measured, runs)
    rows = table.times()
    if OURS in runs:
        rows += table.ratios()
    if OURS in runs and not setting.train:
        rows += [*table.bandwidth(), *table.volumes(), *table.space()]
        rows += [*table.preparation(), *table.break_even()]
    return [*rows, *table.memory(), *table.equality(), *table.trap()]


class _Table:
    def __init__(
        self, setting: Setting, measured: Measured, runs: dict[str, list[dict[str, Any]]]
    ) -> None:
        self.setting, self.measured, self.runs = setting, measured, runs
        self.prepared = measured["prepared"]
        self.case = setting.case
        self.ours = [name for name in ("ours static", "ours belady") if name in runs]
        self.peers = [name for name in runs if not name.startswith("ours")]

    def _label(self, name: str) -> str:
        """A peer's name; says what a scaled figure was scaled from."""
        stretches = {run["stop"] - run["start"] for run in self.runs[name]}
        own = ", own samples" if name.startswith("MariusGNN") else ""
        total = self.measured["sampling"]["batches"]
        if stretches == {total}:
            return f"{name}{own and f' ({own[2:]})'}"
        return f"{name} (scaled from {min(stretches)} of {total} batches{own})"

    def _seconds(self, name: str) -> tuple[float, tuple[float, float]]:
        return median_and_spread([run["scaled_s"] for run in self.runs[name]])

    def _peer_seconds(self) -> dict[str, float]:
        return {self._label(name): self._seconds(name)[0] for name in self.peers}

    def _sequential(self, name: str) -> list[float]:
        """Bandwidth beside each run: the mean of the probes before and after."""
        return [(run["before"][0] + run["after"][0]) / 2 for run in self.runs[name]]

    def times(self) -> list[BenchmarkRow]:
        rows = []
        for name in self.ours:
            median_s, spread = self._seconds(name)
            bytes_read = statistics.median(run["bytes_read"] for run in self.runs[name])
            limit = bytes_read / statistics.median(self._sequential(name))
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"epoch, {self._label(name)}", unit="s",
                    ours=median_s, spread=spread, peers=self._peer_seconds(),
                    limit=None if self.setting.train else limit,
                )
            )  # fmt: skip
        if not self.ours:
            rows += [
                BenchmarkRow(
                    case=self.case, metric=f"epoch, {self._label(name)}", unit="s",
                    ours=self._seconds(name)[0], spread=self._seconds(name)[1],
                )
                for name in self.peers
            ]  # fmt: skip
        return rows

    def bandwidth(self) -> list[BenchmarkRow]:
        rows = []
        for name in self.ours:
            shares = [
                run["bytes_read"] / run["seconds"] / sequential
                for run, sequential in zip(self.runs[name], self._sequential(name), strict=True)
            ]
            median, spread = median_and_spread(shares)
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"share of sequential bandwidth, {name}", unit="ratio",
                    ours=median, spread=spread, limit=1.0, target=OF_SEQUENTIAL,
                    met=median >= OF_SEQUENTIAL,
                )
            )  # fmt: skip
            speeds = [run["bytes_read"] / run["seconds"] for run in self.runs[name]]
            median, spread = median_and_spread(speeds)
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"bytes read per second, {name}", unit="B/s",
                    ours=median, spread=spread, limit=statistics.median(self._sequential(name)),
                )
            )  # fmt: skip
        return rows

    def ratios(self) -> list[BenchmarkRow]:
        """Speed-ups, turn by turn: what ran side by side is compared."""
        targets = {"Ginex": self.setting.speed_up, "mmap": self.setting.speed_up}
        if not self.setting.train:
            targets["DiskGNN"] = 1.0
        rows = []
        for ours in self.ours:
            for name in self.peers:
                pairs = zip(self.runs[name], self.runs[ours], strict=False)
                median, spread = median_and_spread(
                    [p["scaled_s"] / o["scaled_s"] for p, o in pairs]
                )
                target = targets.get(name)
                rows.append(
                    BenchmarkRow(
                        case=self.case, metric=f"speed-up of {ours} over {self._label(name)}",
                        unit="ratio", ours=median, spread=spread, target=target,
                        met=None if target is None else median >= target,
                    )
                )  # fmt: skip
        return rows

    def _per_cold_byte(self, name: str) -> float | None:
        """Bytes read per byte of rows that the cache did not have."""
        run = self.runs[name][0]
        cold = run["rows_requested"] - run["rows_cached"]
        size = run["bytes_read"] or run["process_bytes_read"]
        return size / (cold * self.setting.row_bytes) if cold > 0 and size else None

    def _per_input_byte(self, name: str) -> float | None:
        run = self.runs[name][0]
        size = run["bytes_read"] or run["process_bytes_read"]
        rows = run["rows_requested"]
        return size / (rows * self.setting.row_bytes) if rows else None

    def _collect(self, figure: Any, names: list[str]) -> dict[str, float]:
        found = {name: figure(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def volumes(self) -> list[BenchmarkRow]:
        rows = []
        for name in self.ours:
            amplification = self._per_cold_byte(name)
            if amplification is not None:
                rows.append(
                    BenchmarkRow(
                        case=self.case, metric=f"read amplification, {name}",
                        unit="bytes read / bytes of cold rows", ours=amplification,
                        peers=self._collect(self._per_cold_byte, self.peers),
                        target=AMPLIFICATION, met=amplification <= AMPLIFICATION,
                    )
                )  # fmt: skip
            run = self.runs[name][0]
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"bytes read per epoch, {name}", unit="B",
                    ours=run["bytes_read"],
                )
            )  # fmt: skip
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"bytes read per byte of input rows, {name}",
                    unit="ratio", ours=self._per_input_byte(name) or 0.0,
                    peers=self._collect(self._per_input_byte, self.peers),
                )
            )  # fmt: skip
            hits = {
                peer: self.runs[peer][0]["rows_cached"] / self.runs[peer][0]["rows_requested"]
                for peer in self.peers
            }
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"rows from memory, {name}", unit="share",
                    ours=run["rows_cached"] / run["rows_requested"], peers=hits,
                )
            )  # fmt: skip
            extent = run["bytes_read"] / max(1, run["requests"])
            rows.append(
                BenchmarkRow(case=self.case, metric=f"bytes per request, {name}", unit="B",
                             ours=extent)
            )  # fmt: skip
        return rows

    def space(self) -> list[BenchmarkRow]:
        rows = []
        nodes = self.setting.nodes
        peer = self.prepared.get("DiskGNN")
        for name in self.ours:
            packed = self.prepared[name]["details"]["rows on disk"] / nodes
            peers = {} if peer is None else {"DiskGNN": peer["details"]["rows on disk"] / nodes}
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"disk blow-up, {name}",
                    unit="packed rows / rows of the features", ours=packed, peers=peers,
                    target=BLOW_UP, met=packed <= BLOW_UP,
                )
            )  # fmt: skip
            written = self.prepared[name]["bytes_written"]
            others = {
                other: float(self.prepared[other]["bytes_written"])
                for other in self.prepared
                if not other.startswith("ours") and self.prepared[other]["bytes_written"]
            }
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"bytes on disk beside features and samples, {name}",
                    unit="B", ours=written, peers=others,
                )
            )  # fmt: skip
        return rows

    def preparation(self) -> list[BenchmarkRow]:
        sampling = self.measured["sampling"]["seconds"]
        rows = [
            BenchmarkRow(case=self.case, metric="offline sampling", unit="s", ours=sampling),
        ]
        for name in self.ours:
            peers = {
                other: self.prepared[other]["seconds"] for other in self.peers
                if other in self.prepared
            }  # fmt: skip
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"preparation beside sampling, {name}", unit="s",
                    ours=self.prepared[name]["seconds"], peers=peers,
                )
            )  # fmt: skip
        return rows

    def break_even(self) -> list[BenchmarkRow]:
        """Epochs after which sampling and packing are paid for by the saving per epoch."""
        sampling = self.measured["sampling"]["seconds"]
        rows = []
        for ours in self.ours:
            spent = sampling + self.prepared[ours]["seconds"]
            for name in self.peers:
                saving = self._seconds(name)[0] - self._seconds(ours)[0]
                if name == "in memory" or saving <= 0:
                    continue
                # DiskGNN and Ginex need the samples, and their own preparation, as well.
                own = self.prepared[name]["seconds"]
                own += sampling if name in {"DiskGNN", "Ginex"} else 0.0
                rows.append(
                    BenchmarkRow(
                        case=self.case, metric=f"break-even of {ours} with {self._label(name)}",
                        unit="epochs", ours=max(0.0, spent - own) / saving,
                    )
                )  # fmt: skip
        return rows

    def memory(self) -> list[BenchmarkRow]:
        """The group's highest figure, page cache included, over preparation and epochs."""
        rows = []
        for name, runs in self.runs.items():
            peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"]]
            if not peaks or name == "in memory":
                continue
            limit = self.measured["limit_bytes"]
            kind = self.measured["limit_kind"]
            rows.append(
                BenchmarkRow(
                    case=self.case, metric=f"peak memory under {kind}, {name}", unit="B",
                    ours=max(peaks), limit=limit, target=limit, met=max(peaks) <= limit,
                )
            )  # fmt: skip
        ratio = self.measured["feature_bytes"] / self.measured["limit_bytes"]
        rows.append(
            BenchmarkRow(case=self.case, metric="features / memory limit", unit="ratio", ours=ratio)
        )
        return rows

    def equality(self) -> list[BenchmarkRow]:
        wrong = sum(run["wrong_rows"] for runs in self.runs.values() for run in runs)
        return [
            BenchmarkRow(
                case=self.case, metric="wrong rows among those compared, all systems", unit="rows",
                ours=wrong, target=0, met=wrong == 0,
            )
        ]  # fmt: skip

    def trap(self) -> list[BenchmarkRow]:
        plain = self.measured.get("plain")
        if not plain:
            return []
        case = f"{self.case}; {plain['rows']} rows through a plain memory map"
        return [
            BenchmarkRow(case=case, metric="rows per second", unit="rows/s",
                         ours=plain["rows_per_s"]),
            BenchmarkRow(case=case, metric="bytes read per byte of rows", unit="ratio",
                         ours=plain["amplification"]),
        ]  # fmt: skip
