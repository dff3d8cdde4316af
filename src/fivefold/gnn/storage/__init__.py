"""Files on disk for rows of any size, and the engines that read them fast.

A container holds arrays on page boundaries, a checksum per page and a manifest; it is written
under another name and put in place whole. Engines read runs of rows into their final places.
"""

from fivefold.gnn.storage._buffers import aligned_empty
from fivefold.gnn.storage._container import Container
from fivefold.gnn.storage._format import Section
from fivefold.gnn.storage._gather import gather_rows
from fivefold.gnn.storage._probe import probe_disk
from fivefold.gnn.storage._profile import DiskProfile
from fivefold.gnn.storage._reader import RowReader
from fivefold.gnn.storage._statistics import ReadStatistics
from fivefold.gnn.storage._writer import ContainerWriter
from fivefold.gnn.storage._xxhash import xxh64

__all__ = [
    "Container",
    "ContainerWriter",
    "DiskProfile",
    "ReadStatistics",
    "RowReader",
    "Section",
    "aligned_empty",
    "gather_rows",
    "probe_disk",
    "xxh64",
]
