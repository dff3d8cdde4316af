"""Published checkpoints: read one tensor at a time, and brought to this layer's layout and back."""

from fivefold.moe.checkpoints._files import open_checkpoint
from fivefold.moe.checkpoints._layouts import LAYOUTS, convert_checkpoint, export_checkpoint

__all__ = ["LAYOUTS", "convert_checkpoint", "export_checkpoint", "open_checkpoint"]
