"""Files on disk for rows of any size, and the engines that read them fast.

A container holds arrays on page boundaries, a checksum for each 4 KiB page and a manifest; every
byte of the file is under some checksum. It is written under another name, resumed after a crash
and put in place whole (:class:`ContainerWriter`, :class:`Container`).

A :class:`RowReader` turns runs of rows into requests of whole pages, none of them twice, reads them
past the page cache, compares the checksums and copies each row to its final place, by compiled code
without the interpreter's lock. Its back ends are ``io_uring`` (what "auto" takes where the kernel
permits it) and ``threads`` (``pread``); both pass the same tests. :func:`probe_disk` measures a
disk with the same engine, for the planner.
"""

from fivefold.gnn.storage._container import Container
from fivefold.gnn.storage._disk import DiskProfile, probe_disk
from fivefold.gnn.storage._writer import ContainerWriter
from fivefold.gnn.storage.reader import RowReader

__all__ = ["Container", "ContainerWriter", "DiskProfile", "RowReader", "probe_disk"]
