"""Which experts a token goes to, with what weight, and who is dropped beyond a capacity."""

__all__: list[str] = []
