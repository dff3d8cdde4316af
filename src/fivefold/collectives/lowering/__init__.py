"""Schedules as programs of thread blocks; files of other runtimes; an interpreter."""

__all__: list[str] = []
