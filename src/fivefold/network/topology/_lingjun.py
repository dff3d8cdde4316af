"""Reads the host table of the Alibaba Lingjun data set: a three-layer Clos as it stood in 2023.

The table has a row per host with the columns ``ip``, ``DSW`` (core group), ``PSW`` (aggregation
group, a pod) and ``ASW`` (rack switch). An ASW label is unique only inside its PSW. The data has no
bandwidths, no numbers of switches and no GPUs: those are this reader's arguments, and the
topology's source states them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from fivefold.errors import ConfigurationError, DataError
from fivefold.network.topology._build import Builder
from fivefold.network.topology._clusters import Port, add_clos
from fivefold.network.topology._hosts import HostSpec
from fivefold.network.topology._topology import Topology

_COLUMNS = ("ip", "DSW", "PSW", "ASW")
_SHORT_NAME = 8

# Assumptions, for the data says nothing: 8 GPUs on NVLink and 4 NICs of 200 Gbit/s, a pair of GPUs
# and a NIC under each PCIe switch.
LINGJUN_HOST = HostSpec(gpus=8, nics=4, nvlink="300 GB/s", pcie="32 GB/s")
LINGJUN_PORT = Port("25 GB/s", "1 us")


def load_lingjun(
    path: str | Path,
    *,
    host: HostSpec = LINGJUN_HOST,
    port: Port = LINGJUN_PORT,
    aggs: int = 8,
    cores: int = 32,
    pods: Collection[str] | None = None,
) -> Topology:
    r"""Build the cluster that a Lingjun ``topo.csv`` describes.

    Hosts are numbered pod by pod and rack by rack, in the order of the file within a rack; a host
    is named ``P8/S14/0c9d9de1``: pod, rack, first digits of its hashed address.

    Args:
        path: The CSV file.
        host: What each host is like (assumed).
        port: Rate and latency of a port, and the rack switches' oversubscription (assumed).
        aggs: Aggregation switches per pod (assumed).
        cores: Core switches, a multiple of ``aggs`` (assumed).
        pods: Only these pods (PSW labels); None for all.

    Returns:
        The topology.

    Raises:
        DataError: The file is missing, has other columns, repeats a host, or holds no host.
        ConfigurationError: A pod is not in the file.

    References:
        Cao et al.: Crux, SIGCOMM 2024; data: alibaba/alibaba-lingjun-dataset-2023 on GitHub.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "topo.csv"
        >>> _ = file.write_text("ip,DSW,PSW,ASW\na1,G6,P8,S1\nb2,G6,P8,S2\nc3,G6,P10,S1\n")
        >>> load_lingjun(file).num_ranks, load_lingjun(file, pods=["P8"]).num_ranks
        (24, 16)
    """
    file = Path(path)
    rows = _read(file)
    if pods is not None:
        _check_pods(pods, {row["PSW"] for row in rows})
        rows = [row for row in rows if row["PSW"] in pods]
    rows.sort(key=lambda row: (_natural(row["PSW"]), _natural(row["ASW"])))
    names = _short_names([row["ip"] for row in rows], file)
    places: dict[str, dict[str, list[tuple[str, HostSpec]]]] = {}
    for row in rows:
        rack = f"{row['PSW']}/{row['ASW']}"
        in_pod = places.setdefault(row["PSW"], {})
        in_pod.setdefault(rack, []).append((f"{rack}/{names[row['ip']]}", host))
    builder = Builder()
    add_clos(builder, places, fabric=(aggs, cores, "split"), port=port)
    source = (
        f"Alibaba Lingjun 2023 data set ({file.name}, {len(rows)} hosts), published with Crux, "
        f"SIGCOMM 2024. Assumed, not in the data: {host.gpus} GPUs and {host.ports} ports per "
        f"host, {port.bandwidth} and {port.latency} per port, {aggs} aggregation switches per pod, "
        f"{cores} core switches, oversubscription {port.oversubscription:g}"
    )
    return builder.done("lingjun", source=source)


def _read(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(
                    f"{file} has no column {', '.join(missing)}",
                    hint=f"a Lingjun topology file has the columns {', '.join(_COLUMNS)}",
                )
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="name a topo.csv file") from None
    for number, row in enumerate(rows, start=2):
        if not all((row[name] or "").strip() for name in _COLUMNS):
            raise DataError(f"{file} has an incomplete row in line {number}")
    if not rows:
        raise DataError(f"{file} holds no host", hint="its rows are hosts")
    return rows


def _check_pods(wanted: Collection[str], known: set[str]) -> None:
    unknown = sorted(set(wanted) - known)
    if unknown or not wanted:
        raise ConfigurationError(
            f"there is no pod {', '.join(unknown) or '(none named)'} in the file",
            hint=f"its pods are {', '.join(sorted(known, key=_natural))}",
        )


def _natural(label: str) -> tuple[str, int, str]:
    letters, digits = re.fullmatch(r"(\D*)(\d*).*", label, re.DOTALL).groups()  # type: ignore[union-attr]
    return letters, int(digits or -1), label


def _short_names(addresses: list[str], file: Path) -> Mapping[str, str]:
    if len(set(addresses)) != len(addresses):
        twice = next(one for one in addresses if addresses.count(one) > 1)
        raise DataError(f"{file} names host {twice} more than once", hint="one row per host")
    for length in range(_SHORT_NAME, 1 + max(_SHORT_NAME, *map(len, addresses))):
        short = {address: address[:length] for address in addresses}
        if len(set(short.values())) == len(short):
            return short
    return {address: address for address in addresses}
