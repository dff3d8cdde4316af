"""Files on disk for rows of any size, and the engines that read them fast.

A container holds arrays on page boundaries under checksums, and is written whole or not at all
(:class:`ContainerWriter`, :class:`Container`). A :class:`RowReader` reads runs of its rows past the
page cache, by io_uring or by threads. :func:`probe_disk` measures a disk with the same engine.
"""

from fivefold.gnn.storage._container import Container
from fivefold.gnn.storage._disk import DiskProfile, probe_disk
from fivefold.gnn.storage._writer import ContainerWriter
from fivefold.gnn.storage.reader import RowReader

__all__ = ["Container", "ContainerWriter", "DiskProfile", "RowReader", "probe_disk"]
