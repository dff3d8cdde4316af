"""Text to token numbers and back: bytes by default, any ``tokenizers`` file by option.

A tokenizer has one token that no text contains, the document end; the corpus puts it between
files so that a model can tell where one ends. This module knows nothing of files of text, of
splits or of models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.files import parse_json, read_bytes

_NUM_BYTES = 256
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>")


class Tokenizer(Protocol):
    """What the corpus and the model need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, the document end included."""
        ...

    @property
    def document_end(self) -> int:
        """Return the token between two documents."""
        ...

    @property
    def fingerprint(self) -> str:
        """Return a text that changes whenever the same text would give other tokens."""
        ...

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the tokens of a text (bytes are UTF-8), without a document end."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; the document end gives nothing."""
        ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token; 256 is the document end."""

    vocab_size = _NUM_BYTES + 1
    document_end = _NUM_BYTES
    fingerprint = "bytes-1"

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the tokens of a text: its UTF-8 bytes."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return bytes(token for token in tokens if token < _NUM_BYTES).decode(errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library.

    The document end is the file's own end token where it has one of the usual names, else a new
    token after the last.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        content = _read_json(self.path)
        self._inner = _load_inner(self.path, content)
        size = self._inner.get_vocab_size(with_added_tokens=True)
        # Numbers may have gaps, so the largest one counts, not how many there are.
        largest = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        known = (self._inner.token_to_id(name) for name in _END_NAMES)
        end = next((token for token in known if token is not None), None)
        first_free = max(size, largest + 1)
        self.document_end: int = first_free if end is None else end
        self.vocab_size: int = first_free + (end is None)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.fingerprint = f"tokenizers-1-{digest}"

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the tokens of a text, without special tokens."""
        decoded = text if isinstance(text, str) else text.decode()
        tokens = self._inner.encode(decoded, add_special_tokens=False).ids
        return np.asarray(tokens, dtype=np.uint32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        kept = [int(token) for token in tokens if token != self.document_end]
        text: str = self._inner.decode(kept, skip_special_tokens=True)
        return text


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer of a configuration's ``data.tokenizer``.

    Args:
        spec: ``"bytes"``, or the path of a ``tokenizer.json`` or of the folder that holds one.

    Returns:
        The tokenizer.

    Raises:
        ConfigurationError: The file is missing or is not a tokenizer.
        UnsupportedError: The ``tokenizers`` package is needed and not installed.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    return HuggingFaceTokenizer(path / "tokenizer.json" if path.is_dir() else path)


def _read_json(path: Path) -> bytes:
    hint = 'data.tokenizer is "bytes" or the path of a tokenizer.json'
    try:
        content = read_bytes(path, what="tokenizer file")
        parse_json(content, where=f"tokenizer file {path}")
    except DataError as error:
        raise ConfigurationError(error.message, hint=hint) from None
    return content


def _load_inner(path: Path, content: bytes) -> Any:
    try:
        import tokenizers  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise UnsupportedError(
            f"tokenizer {path} needs the package 'tokenizers', which is not installed",
            hint='pip install "fivefold[tokenizers]", or set data.tokenizer = "bytes"',
        ) from error
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises a bare Exception for a file of another kind
        raise ConfigurationError(
            f"{path} is JSON, but not a file of the tokenizers library: {error}",
            hint="give a tokenizer.json as written by tokenizers.Tokenizer.save",
        ) from error
