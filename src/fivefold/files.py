"""Read text, TOML, JSON and XML that a user gives; write files whole or not at all.

Whatever the file is, reading it ends in bounded time and memory, with plain values or with one
clear error. What a parser would let through and later code would trip over is refused here: a
pipe or a device, gigabytes, a thousand levels of brackets, whole numbers of more than 64 bits,
numbers that are none, a key given twice, text that cannot be written again. TOML is what people
write, so its errors are of configuration; JSON is what programs write, so its errors are of data.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import stat
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

from fivefold.errors import (
    ConfigurationError,
    DataError,
    FivefoldError,
    StorageError,
    UnsupportedError,
)
from fivefold.units import format_bytes

__all__ = [
    "free_bytes",
    "nearest_file",
    "parse_json",
    "parse_toml",
    "read_bytes",
    "read_checked_json",
    "read_json",
    "read_text",
    "read_toml",
    "storage_error",
    "sync_folder",
    "write_atomically",
    "write_checked_json",
]

_LOG = logging.getLogger(__name__)
_LOCK_POLL_S = 0.05
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_MOST_LEVELS = 100
_DOCTYPE = 4  # expat's values for one: name, places, and whether declarations follow
_MOST_ELEMENTS = 1_000_000  # of XML: the whole tree is kept
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1
# tomllib's time grows with the square of the parts of a dotted key: 32 kB take three seconds.
_DOTTED_KEY = re.compile(
    rf"""(?<![\w"'.-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_MOST_LEVELS}}}"""
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CHECKSUM = "checksum"
_MOST_CHECKED_BYTES = 64 << 20
_STORAGE_HINTS = {
    errno.EIO: "the disk or its driver failed: look into the kernel's log, copy the file "
    "elsewhere or make it again",
    errno.ENOSPC: "free some space or choose another disk; what was written stays for resuming",
    errno.EDQUOT: "free some space of your quota; what was written stays for resuming",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f); what was written stays for resuming",
    errno.EACCES: "check the permissions of the file and of its folder",
    errno.EROFS: "the file system is mounted read-only: choose another folder",
    errno.ENOENT: "check the path; the folder must exist",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n) or close some readers",
}


@dataclass(frozen=True)
class _Form:
    """Name, most bytes and error of a kind of text."""

    name: str
    most_bytes: int
    error: type[FivefoldError]
    hint: str


_TEXT = _Form("text", 256 << 20, DataError, "give a text file in UTF-8")
_TOML = _Form(
    "TOML",
    64 << 20,  # tomllib reads about 7 MB a second
    ConfigurationError,
    'tables look like [run], keys like steps = 100; strings need quotes: "co2"',
)
_JSON = _Form(
    "JSON", 256 << 20, DataError, "the file is damaged or of another program: write it again"
)

_YAML = _Form("YAML", 16 << 20, DataError, "the file is damaged or of another program")


def read_toml(path: str | os.PathLike[str], *, what: str = "configuration file") -> dict[str, Any]:
    r"""Read a TOML file.

    Args:
        path: The file.
        what: Words for the file, before its path in messages.

    Raises:
        ConfigurationError: The file is missing, cannot be read, is not TOML, or is beyond a limit.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.toml"
        >>> _ = file.write_text("[run]\nsteps = 1\n")
        >>> read_toml(file)
        {'run': {'steps': 1}}
    """
    where = f"{what} {os.fspath(path)}"
    return parse_toml(_decoded(_read(Path(path), where, _TOML), where, _TOML), where=where)


def read_json(path: str | os.PathLike[str], *, what: str = "file", finite: bool = True) -> Any:
    """Read a JSON file.

    Args:
        path: The file.
        what: Words for the file, before its path in messages.
        finite: As for ``parse_json``.

    Returns:
        Its value: a dict, a list, text, a number, a boolean or None.

    Raises:
        DataError: The file is missing, cannot be read, is not JSON, or is beyond a limit.
    """
    where = f"{what} {os.fspath(path)}"
    return parse_json(_read(Path(path), where, _JSON), where=where, finite=finite)


def read_text(path: str | os.PathLike[str], *, what: str = "file") -> str:
    """Read a file of text in UTF-8; arguments as of ``read_json``.

    Raises:
        DataError: The file is missing, no regular file, too large, or no text.
    """
    where = f"{what} {os.fspath(path)}"
    return _decoded(_read(Path(path), where, _TEXT), where, _TEXT)


def read_bytes(path: str | os.PathLike[str], *, what: str = "file") -> bytes:
    """Read a file as it is, for readers that go through it by themselves; else as ``read_text``.

    Raises:
        DataError: The file is missing, no regular file, or too large.
    """
    return _read(Path(path), f"{what} {os.fspath(path)}", _TEXT)


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    """Read TOML that is at hand.

    Args:
        text: The TOML.
        where: What it is, at the head of messages.

    Raises:
        ConfigurationError: It is not TOML, or is beyond a limit.
    """
    _check_size(len(text), where, _TOML)
    if _DOTTED_KEY.search(text):
        raise _too_deep(where, _TOML)
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(where, _TOML) from None
    except ValueError as error:
        raise _not_of_the_form(error, where, _TOML) from None
    _check_values(found, where, _TOML, finite=True)
    return found


def parse_json(text: str | bytes, *, where: str, finite: bool = True) -> Any:
    """Read JSON that is at hand.

    Args:
        text: The JSON.
        where: What it is, at the head of messages.
        finite: Refuse NaN and infinities, which JSON does not have but Python writes.

    Raises:
        DataError: It is not JSON, or is beyond a limit.

    Examples:
        >>> parse_json("[1, 2]", where="the text")
        [1, 2]
        >>> parse_json('{"a": 1, "a": 2}', where="the text")
        Traceback (most recent call last):
        fivefold.errors.DataError: the text has the key 'a' twice; keep one of the two
    """

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise DataError(f"{where} has the key {twice[:60]!r} twice", hint="keep one of the two")
        return found

    _check_size(len(text), where, _JSON)
    text = text if isinstance(text, str) else _decoded(text, where, _JSON)
    try:
        found = json.loads(text, object_pairs_hook=table)
    except DataError:
        raise
    except RecursionError:
        raise _too_deep(where, _JSON) from None
    except ValueError as error:
        raise _not_of_the_form(error, where, _JSON) from None
    _check_values(found, where, _JSON, finite=finite)
    return found


@dataclass(slots=True)
class XmlElement:
    """An element of XML: its tag, attributes and children, and the line where it begins."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[XmlElement] = field(default_factory=list)


def parse_xml(
    text: str, *, where: str, check: Callable[[XmlElement, XmlElement], None] | None = None
) -> XmlElement:
    """Read XML that is at hand: elements and attributes, without the text between them.

    Entities are refused, and document types that may declare them: a small file becomes large with
    them. A document type that only names one elsewhere is passed over; nothing is loaded.

    Args:
        text: The XML.
        where: What it is, at the head of messages.
        check: Called with each element and the one around it, as soon as it begins; may refuse it.

    Returns:
        The root.

    Raises:
        DataError: It is no XML, declares a document type or an entity, or is beyond a limit.

    Examples:
        >>> root = parse_xml("<system><cpu numaid='0'/></system>", where="a topology")
        >>> root.tag, root.children[0].attributes
        ('system', {'numaid': '0'})
    """
    parser = expat.ParserCreate()
    top = XmlElement("", {}, 0)
    stack, count = [top], 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > _MOST_ELEMENTS or len(stack) > _MOST_LEVELS:
            raise DataError(
                f"{where} is too large: XML may have {_MOST_ELEMENTS:,} elements in "
                f"{_MOST_LEVELS} levels",
                hint="is it the file that you mean?",
            )
        element = XmlElement(tag, attributes, parser.CurrentLineNumber)
        if check is not None:
            check(element, stack[-1])
        stack[-1].children.append(element)
        stack.append(element)

    def refuse(*declared: object) -> None:
        if len(declared) == _DOCTYPE and not declared[-1]:  # a name alone, which nothing follows
            return
        raise DataError(
            f"{where}: line {parser.CurrentLineNumber}: a document type or an entity is declared",
            hint="neither is needed; remove the declaration",
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: stack.pop()
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        message = f"{where}: line {error.lineno}: this is no XML: {error}"
        raise DataError(message, hint="is the file whole?") from error
    return top.children[0]


def parse_yaml(text: str, *, where: str, twice: list[str] | None = None) -> Any:
    """Read YAML that is at hand: plain values, no objects.

    Args:
        text: The YAML.
        where: What it is, at the head of messages.
        twice: Where keys that are given twice are added: the last counts, as in PyYAML. Without
            it they are refused.

    Raises:
        UnsupportedError: PyYAML is not installed.
        DataError: It is no YAML, has a key twice, or is beyond a limit.
    """
    try:
        import yaml  # noqa: PLC0415 - only files of other programs are written in it
    except ImportError as error:
        message = f"{where} is YAML, and PyYAML is not installed"
        raise UnsupportedError(message, hint="pip install pyyaml") from error
    _check_size(len(text), where, _YAML)
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_keys(node, where, twice)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise _too_deep(where, _YAML) from None
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise DataError(f"{where} is not YAML: {said:.200}", hint="mend that line") from error


def _check_keys(root: Any, where: str, twice: list[str] | None) -> None:
    """Refuse or note a key that a table of YAML's nodes has twice: parsers take the last."""
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        if node.id == "scalar":
            continue
        children = node.value
        if node.id == "mapping":
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if key.id != "scalar" or key.tag.endswith(":merge"):
                    continue
                if twice is not None and (key.tag, key.value) in lines:
                    twice.append(key.value)
                elif (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    message = f"{where} has the key {key.value[:60]!r} twice, in lines {first}"
                    raise DataError(f"{message} and {line}", hint="keep one of the two")
                lines[key.tag, key.value] = line
            children = [one for pair in node.value for one in pair]
        for child in children:  # what an alias names is one node
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Put a file in place: afterwards it is whole and on the disk, or as it was before.

    Args:
        path: Its place, in a folder that exists.
        content: Bytes, or text to be written as UTF-8.

    Raises:
        OSError: The system refused; nothing of the file is left behind.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    # Two processes may write the same file at the same time: each needs a name of its own.
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.tmp")
    _put_in_place(path, data, temporary)


def _put_in_place(path: Path, data: bytes, temporary: Path) -> None:
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Wait until the names in a folder are on the disk, such as those of renamed files.

    Raises:
        OSError: The system refused.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checked_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Put a dictionary in place as JSON under a checksum of all of its contents.

    Args:
        path: The file, in a folder that exists.
        value: What JSON can hold; keys become text.

    Raises:
        StorageError: The disk refused.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.json"
        >>> write_checked_json(file, {"epochs": 3})
        >>> read_checked_json(file)
        {'epochs': 3}
    """
    plain = json.loads(json.dumps(value))  # keys become text, as they will be when read
    data = json.dumps({**plain, _CHECKSUM: _checksum(plain)}, sort_keys=True).encode()
    place = Path(path)
    try:
        # Such files have one writer at a time: under one name, what a kill leaves is used again.
        _put_in_place(place, data, place.with_name(place.name + ".new"))
    except OSError as error:
        raise storage_error(error.errno or 0, path, f"writing {len(data)} bytes") from error


def read_checked_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`write_checked_json` wrote.

    Returns:
        The dictionary, without the checksum.

    Raises:
        DataError: It is damaged, of something else, or an older version wrote it.
        FileNotFoundError: There is none.
        StorageError: The disk refused.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DataError(f"{path} is no regular file", hint="check the path")
            # Not more than there is: the buffer is made before it is filled.
            data = file.read(min(os.fstat(file.fileno()).st_size, _MOST_CHECKED_BYTES) + 1)
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise DataError(f"{path} is no regular file", hint="check the path") from None
    except OSError as error:
        raise storage_error(error.errno or 0, path, "reading") from error
    hint = "make it again, or copy it again from its source"
    if len(data) > _MOST_CHECKED_BYTES:
        size = format_bytes(_MOST_CHECKED_BYTES)
        raise DataError(f"{path} is too large: at most {size} are read", hint=hint)
    try:
        value = parse_json(data, where=str(path), finite=False)
    except DataError as error:
        raise DataError(f"{path} is damaged: it cannot be read as JSON", hint=hint) from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it is no JSON object", hint=hint)
    found = value.pop(_CHECKSUM, None)
    if found is None:
        message = f"{path} has no checksum: it is damaged, or an older version wrote it"
        raise DataError(message, hint=hint)
    if found != _checksum(value):
        raise DataError(f"{path} is damaged: its checksum is wrong", hint=hint)
    return value


def storage_error(
    number: int, path: str | os.PathLike[str], action: str, *, offset: int | None = None
) -> StorageError:
    """Return the error to raise after a failed system call.

    Args:
        number: Its ``errno``.
        path: The file.
        action: What was attempted, as in "reading 4096 bytes".
        offset: Where in the file, in bytes; None where there is no place.
    """
    place = "" if offset is None else f" at offset {offset}"
    message = f"{action} of {os.fspath(path)}{place} failed: {os.strerror(number)}"
    if number in {errno.ENOSPC, errno.EDQUOT}:
        message += f" ({format_bytes(free_bytes(Path(path).parent))} free)"
    error = StorageError(message, hint=_STORAGE_HINTS.get(number, "see the system's message"))
    error.errno = number
    return error


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the bytes that an ordinary user may still write below a folder.

    Returns:
        Free space, in bytes.
    """
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _checksum(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read(path: Path, where: str, form: _Form) -> bytes:
    hint = f"name a {form.name} file that you may read"
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
                raise form.error(f"{where} is {kind} and not a regular file", hint=hint)
            data = file.read(form.most_bytes + 1)
    except FivefoldError:
        raise
    except FileNotFoundError:
        raise form.error(f"{where} does not exist", hint=_nearest_file(path, form)) from None
    except (OSError, ValueError) as error:  # a path with a NUL character is a ValueError
        why = error.strerror if isinstance(error, OSError) else error
        raise form.error(f"{where} cannot be read: {why}", hint=hint) from error
    _check_size(len(data), where, form)
    return data


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would hold us


def _decoded(data: bytes, where: str, form: _Form) -> str:
    hint = "save it as UTF-8"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 text ({error.reason}) at byte {error.start:,}"
    else:
        if text.startswith("\ufeff"):
            problem, hint = "it begins with a byte order mark", f"{hint} without a byte order mark"
        elif "\0" in text:
            problem = "it holds NUL characters"
        else:
            return text
    raise form.error(f"{where} is not {form.name}: {problem}", hint=hint)


def _check_size(size: int, where: str, form: _Form) -> None:
    if size > form.most_bytes:
        raise form.error(
            f"{where} is too large: {form.name} may have {form.most_bytes >> 20} MiB",
            hint="is it the file that you mean?",
        )


def _too_deep(where: str, form: _Form) -> FivefoldError:
    return form.error(
        f"{where} is nested too deeply: at most {_MOST_LEVELS} tables and lists in one another",
        hint="is it the file that you mean?",
    )


def _not_of_the_form(error: ValueError, where: str, form: _Form) -> FivefoldError:
    if "integer string conversion" in str(error):  # Python's own limit on the digits it converts
        return form.error(
            f"{where} has a whole number of more than 4,300 digits",
            hint=f"numbers go from {_SMALLEST} to {_LARGEST}",
        )
    return form.error(f"{where} is not {form.name}: {error}", hint=form.hint)


def _check_values(found: Any, where: str, form: _Form, *, finite: bool) -> None:
    """Look at every key and value, level by level and without recursion."""
    level = [found]
    for levels_left in range(_MOST_LEVELS, -1, -1):
        below = []
        for value in level:
            if isinstance(value, list | dict) and not levels_left:
                raise _too_deep(where, form)
            if isinstance(value, list):
                below += value
            elif isinstance(value, dict):
                below += value.values()
                below += value
            elif (problem := _problem(value, form, finite=finite)) is not None:
                wanted, hint = problem
                key = _key_of(value, found, _MOST_LEVELS) or "a value"
                got = f"{value!r:.60}"
                raise form.error(f"{key} must be {wanted}; got {got} (in {where})", hint=hint)
        if not below:
            return
        level = below


def _problem(value: object, form: _Form, *, finite: bool) -> tuple[str, str] | None:
    if isinstance(value, int):
        if not _SMALLEST <= value <= _LARGEST:
            return "a number of 64 bits", f"numbers go from {_SMALLEST} to {_LARGEST}"
    elif isinstance(value, float) and finite:
        # TOML has infinity, and some keys mean "no bound" by it; JSON has only finite numbers.
        if math.isnan(value) or (math.isinf(value) and form is _JSON):
            return "a finite number", "nan and infinity are no numbers to compute with"
    elif isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
        return "text", "half a surrogate pair is no character"
    return None


def _key_of(wanted: object, found: Any, levels: int) -> str:
    """Return the dotted name of where a value stands; empty where that is deeper."""
    if not levels or not isinstance(found, dict | list):
        return ""
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    for key, value in pairs:
        name = f".{key:.60}" if isinstance(key, str) else f"[{key}]"
        if value is wanted:
            return name.removeprefix(".")
        if below := _key_of(wanted, value, levels - 1):
            joined = below if below.startswith("[") else f".{below}"
            return f"{name}{joined}".removeprefix(".")
    return ""


def nearest_file(path: str | os.PathLike[str]) -> Path | None:
    """Return the file of the same folder and ending whose name is most like that of ``path``.

    Args:
        path: A file that is not there.

    Returns:
        None where no name is like it.
    """
    path = Path(path)
    try:
        names = {
            other.stem: other for other in path.parent.iterdir() if other.suffix == path.suffix
        }
    except (OSError, ValueError):
        return None
    close = difflib.get_close_matches(path.stem, list(names)[:1000], n=1, cutoff=0.6)
    return names[close[0]] if close else None


def _nearest_file(path: Path, form: _Form) -> str:
    near = nearest_file(path)
    if near is not None:
        return f"did you mean {near}?"
    like = ", such as examples/train.toml" if form is _TOML else ""
    return f"give the path of a {form.name} file{like}"


def lock_file(descriptor: int, path: str | os.PathLike[str], *, patience_s: float) -> bool:
    """Return whether the lock on an open file was had in time; its process's end frees it.

    On a file system without locks nobody is kept out, which a warning says.
    """
    give_up_at_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_at_s:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _LOG.warning(
                "the file system of %s has no locks: make sure that no other process writes there",
                os.fspath(path),
            )
            return True
        else:
            return True
