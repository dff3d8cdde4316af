"""Text files to memory-mapped tokens."""
from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fivefold.errors import DataError

if TYPE_CHECKING:
    from fivefold.train._config import DataConfig
    from fivefold.train._tokenizer import Tokenizer

__all__ = ["Corpus", "load_corpus"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens of a folder of text, split by file."""

    train: np.ndarray
    validation: np.ndarray
    train_bytes: int
    validation_bytes: int
    num_files: int
    num_skipped: int
    fingerprint: str


def load_corpus(data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """Tokens of the configured text (first form, in memory)."""
    root = Path(sysconfig.get_path("stdlib") if data.path == "stdlib" else data.path)
    parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
    sizes = {True: 0, False: 0}
    end = np.array([tokenizer.document_end])
    count = 0
    for path in sorted(root.rglob("*.py" if data.path == "stdlib" else "*")):
        if {"site-packages", "dist-packages", "__pycache__"} & set(path.parts) or not path.is_file():
            continue
        name = str(path.relative_to(root))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        held_out = int.from_bytes(digest) / 2**64 < data.validation_fraction
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            continue
        count += 1
        sizes[held_out] += len(content)
        parts[held_out] += [tokenizer.encode(content), end]
    if not parts[True] or not parts[False]:
        raise DataError(f"no text in {root}")
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    return Corpus(
        train=np.concatenate(parts[False]).astype(dtype),
        validation=np.concatenate(parts[True]).astype(dtype),
        train_bytes=sizes[False],
        validation_bytes=sizes[True],
        num_files=count,
        num_skipped=0,
        fingerprint="",
    )
