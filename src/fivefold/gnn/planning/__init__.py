"""What goes where: cache contents, disk layout, cost and space."""

__all__: list[str] = []
