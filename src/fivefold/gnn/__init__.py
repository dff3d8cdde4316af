"""Out-of-core training of graph neural networks: features many times larger than memory.

Mini-batches are sampled offline, their feature rows are packed in the order in which training
will read them, and a pipeline streams them at the speed of the disk (DiskGNN, arXiv 2405.05231).

The packages, each importing only those before it: ``storage`` (files and fast reads), ``sampling``
and ``data``, ``planning`` (which row goes to which level), ``packing``, ``loading`` and
``training``. Import them by their own names.
"""

__all__: list[str] = []
