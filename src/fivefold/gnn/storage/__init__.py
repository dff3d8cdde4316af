"""Files on disk for rows of any size, and the engines that read them fast."""

__all__: list[str] = []
