"""Collectives as pre- and postconditions, schedules as transfers; verifier, cost, lower bounds."""

__all__: list[str] = []
