"""The operator in Triton: device code, its memory and its launches; triton is loaded when used."""

__all__: list[str] = []
