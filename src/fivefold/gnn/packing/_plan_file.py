"""A plan as a file: its text as an attribute, its arrays as sections of one container."""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.errors import DataError
from fivefold.gnn.planning import Plan
from fivefold.gnn.storage import Container, ContainerWriter

_KIND = "plan"


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan, whole or not at all.

    Args:
        plan: What ``make_plan`` decided.
        path: File to write; one that is there is replaced.

    Raises:
        StorageError: The disk refused.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from fivefold.gnn.planning import BatchList, Budgets, FeatureInfo, make_plan
        >>> class Disk:
        ...     sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9
        ...     def seconds(self, requests, size_bytes):
        ...         return requests * 1e-5 + size_bytes / 1e9
        >>> samples = BatchList([np.array([0, 1, 2]), np.array([0, 3])], num_nodes=5)
        >>> features = FeatureInfo(num_nodes=5, row_bytes=2048, fingerprint="x")
        >>> budgets = Budgets(host_bytes=2048, disk_bytes=10**6)
        >>> plan = make_plan(samples, features, budgets, Disk(), buffer_batches=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_plan(plan, f"{folder}/plan.fvf")
        ...     read_plan(f"{folder}/plan.fvf").fingerprint == plan.fingerprint
        True
    """
    arrays = plan.arrays()
    sections = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with ContainerWriter(
        path, kind=_KIND, sections=sections, attributes={"plan": plan.to_json()}
    ) as writer:
        for name, array in arrays.items():
            writer.write(name, 0, array)
        writer.commit().close()


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read what :func:`write_plan` wrote.

    Raises:
        DataError: The file is missing, damaged or no plan.

    Examples:
        >>> try:
        ...     read_plan("/nowhere/plan.fvf")
        ... except DataError:
        ...     print("no plan")
        no plan
    """
    with Container.open(path, kind=_KIND) as container:
        text = container.attributes.get("plan")
        if not isinstance(text, str):
            raise DataError(f"{Path(path)} holds no plan", hint="make it again with make_plan")
        arrays = {name: container.read(name) for name in container.sections}
    return Plan.from_json(text, arrays)
