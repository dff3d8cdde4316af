"""A folder of text as two memory-mapped arrays of tokens: training and validation.

A tokenizer (bytes by default, any ``tokenizers`` file by option) has one token that no text
contains, the document end, which ends each file, so that a model can tell where one ends. Files are
read in the order of their names. A file belongs to validation if a hash of its name falls below the
wanted share, so adding files moves no other file across the split; the last part of a file that is
alone. Tokens are built once, in pieces of bounded size, decoded again and compared with the text,
and cached; ``_token_cache.py`` makes the cache survive crashes and concurrent builders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.files import parse_json, read_bytes
from fivefold.runs import ProgressBar
from fivefold.train._text_files import (
    Account,
    Entry,
    SourceFile,
    cut_in_two,
    find_files,
    read_pieces,
    require_most_read,
    resolve_source,
    why_not_text,
)
from fivefold.train._token_cache import TokenWriter, cache_folder, open_or_build
from fivefold.train.config import DataConfig

_NUM_BYTES = 256
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>")


class Tokenizer(Protocol):
    """Tokenizer as the corpus and the model need it."""

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

    def lost_bytes(self, text: bytes, tokens: np.ndarray) -> int:
        """Return how many bytes of a text do not come back from its tokens."""
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

    def lost_bytes(self, text: bytes, tokens: np.ndarray) -> int:
        """Return 0: the tokens are the bytes."""
        assert len(text) == len(tokens), "a byte is a token"
        return 0


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library.

    The document end is the file's own end token where it has one of the usual names, else a new
    token after the last. What a file was saved with for batches of a model (truncation, padding)
    or for chance (dropout of merges) is switched off: a corpus is the whole text.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        content = _read_json(self.path)
        self._inner = _load_inner(self.path, content)
        whole = self._inner.truncation is None and self._inner.padding is None
        self._inner.no_truncation()
        self._inner.no_padding()
        if getattr(self._inner.model, "dropout", None):
            self._inner.model.dropout, whole = None, False
        size = self._inner.get_vocab_size(with_added_tokens=True)
        # Numbers may have gaps, so the largest one counts, not how many there are.
        largest = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        known = (self._inner.token_to_id(name) for name in _END_NAMES)
        end = next((token for token in known if token is not None), None)
        first_free = max(size, largest + 1)
        self.document_end: int = first_free if end is None else end
        self.vocab_size: int = first_free + (end is None)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        # 2: tokens from before cut texts or padded them.
        self.fingerprint = f"tokenizers-{1 if whole else 2}-{digest}"

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

    def lost_bytes(self, text: bytes, tokens: np.ndarray) -> int:
        """Return how many bytes of a text do not come back from its tokens, in whatever order.

        Few where the file lowers or normalises letters, or its decoder knows no line ends; most
        where texts are cut or their words unknown.
        """
        decoded: str = self._inner.decode(tokens.tolist(), skip_special_tokens=False)
        back = decoded.encode(errors="replace")
        if back == text:
            return 0
        told, came = (
            np.bincount(np.frombuffer(part, dtype=np.uint8), minlength=_NUM_BYTES)
            for part in (text, back)
        )
        return int(np.clip(told - came, 0, None).sum())


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


_FORMAT = "corpus-2"
_SPLITS = ("train", "validation")
_PROGRESS_AFTER_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens of a folder of text, split by file, and what became of its bytes."""

    train: np.ndarray
    validation: np.ndarray
    train_bytes: int
    validation_bytes: int
    num_files: int
    num_skipped: int
    fingerprint: str
    account: dict[str, Any]


def load_corpus(data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    r"""Load the tokens of the configured text, from the cache or built now.

    Every rank may call this at the same time: one of them builds, the others wait and read.

    Args:
        data: Source, split and cache.
        tokenizer: Makes the tokens.

    Returns:
        The corpus.

    Raises:
        DataError: The folder is missing or has no text, a split would be empty or shorter than
            one sequence, or the cache cannot be written.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from fivefold.train.config import DataConfig
        >>> from fivefold.train._corpus import ByteTokenizer
        >>> folder = Path(tempfile.mkdtemp())
        >>> for number in range(20):
        ...     _ = (folder / f"{number}.txt").write_text("some text\n" * 20)
        >>> data = DataConfig(path=str(folder), cache=tempfile.mkdtemp(),
        ...                   validation_fraction=0.3)
        >>> corpus = load_corpus(data, ByteTokenizer())
        >>> corpus.num_files, len(corpus.train) + len(corpus.validation)
        (20, 4020)
    """
    root = resolve_source(data.path)
    files, others = find_files(root, library=data.path == "stdlib")
    if not files:
        raise DataError(
            f"data folder {root} has no files to read",
            hint="put text files into it; hidden and empty files are not read",
        )
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    arrays, facts = open_or_build(
        cache_folder(data.cache),
        _cache_key(root, files, others, tokenizer, data.validation_fraction),
        dtype=dtype,
        build=lambda writer: _build(
            writer, files, Account(root, files, others), tokenizer, data.validation_fraction
        ),
    )
    for split in _SPLITS:
        _require_length(split, len(arrays[split]), data)
    return Corpus(train=arrays["train"], validation=arrays["validation"], **facts)


def _build(
    writer: TokenWriter,
    files: list[SourceFile],
    account: Account,
    tokenizer: Tokenizer,
    validation_fraction: float,
) -> dict[str, Any]:
    """Write both splits; returns the corpus' facts."""
    texts = []
    for file in _with_progress(files):
        if (reason := why_not_text(file)) is None:
            texts.append(file)
        else:
            account.leave_out(file, *reason)
    record = account.record()
    require_most_read(record)
    size_bytes = dict.fromkeys(_SPLITS, 0)
    digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
    document_end = np.array([tokenizer.document_end])
    for file, split, start, stop in _parts(texts, validation_fraction):
        digest.update(f"\0{split}\0".encode())
        for piece in read_pieces(file.path, start, stop):
            tokens = tokenizer.encode(piece)
            record["lost_in_tokens_bytes"] += tokenizer.lost_bytes(piece, tokens)
            writer.append(split, tokens)
            digest.update(piece)
            size_bytes[split] += len(piece)
        writer.append(split, document_end)
    require_most_read(record)
    return {
        "train_bytes": size_bytes["train"],
        "validation_bytes": size_bytes["validation"],
        "num_files": len(texts),
        "num_skipped": len(files) - len(texts),
        "fingerprint": digest.hexdigest(),
        "account": record,
    }


def _parts(
    texts: list[SourceFile], fraction: float
) -> Iterator[tuple[SourceFile, str, int, int | None]]:
    """Yield files with their split, and from which byte to which."""
    if len(texts) < len(_SPLITS):
        cut = cut_in_two(texts[0], fraction)
        yield texts[0], "train", 0, cut
        yield texts[0], "validation", cut, None
        return
    held_out = _held_out([file.name for file in texts], fraction)
    for file in _with_progress(texts):
        yield file, "validation" if file.name in held_out else "train", 0, None


def _held_out(names: list[str], fraction: float) -> set[str]:
    """Return the names of the validation files: those whose hash is below the fraction.

    With few files the hash may leave a split empty; then it gets the one file whose hash is
    nearest, so that any folder with two files can be trained on.
    """
    ranked = sorted(names, key=_place)
    count = sum(_place(name) < fraction for name in names)
    return set(ranked[: min(max(count, 1), len(names) - 1)])


def _place(name: str) -> float:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _cache_key(
    root: Path,
    files: list[SourceFile],
    others: list[Entry],
    tokenizer: Tokenizer,
    validation_fraction: float,
) -> str:
    digest = hashlib.blake2b(digest_size=16)
    parts = [_FORMAT, str(root.resolve()), tokenizer.fingerprint, repr(validation_fraction)]
    parts += [f"{file.name}\0{file.size_bytes}\0{file.modified_ns}" for file in files]
    parts += [f"{entry.name}\0{entry.why}" for entry in others if entry.missed]
    for part in parts:
        digest.update(part.encode(errors="surrogateescape") + b"\n\0")
    return digest.hexdigest()


def _require_length(split: str, num_tokens: int, data: DataConfig) -> None:
    needed = data.sequence_length + 1
    if num_tokens < needed:
        raise DataError(
            f"the {split} split has {num_tokens} tokens, too few for one sequence of "
            f"{data.sequence_length} and its targets ({needed})",
            hint="use more text, change data.validation_fraction, or lower data.sequence_length",
        )


def _with_progress(files: list[SourceFile]) -> Iterable[SourceFile]:
    """Yield the files, with a progress bar where reading them takes long."""
    total = sum(file.size_bytes for file in files)
    if total < _PROGRESS_AFTER_BYTES:
        yield from files
        return
    done = 0
    with ProgressBar() as progress:
        for file in files:
            yield file
            done += file.size_bytes
            progress("reading text", done, total)
