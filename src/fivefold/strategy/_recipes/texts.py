"""The settings of a recipe as they stand in its text: shell script, YAML, TOML or Python.

Nothing is run: a script's variables and sums are followed, a module is only parsed.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.errors import DataError

_ASSIGNMENT = re.compile(
    r"^\s*((?:export|local|readonly|declare(?:\s+-\w+)*)\s+)?([A-Za-z_]\w*)(\+?)=(.*)$"
)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$(\w+)")
_WHERE_SET = re.compile(r"\$\{(\w+):?\+([^{}]*)\}")
_SUM = re.compile(r"\$\(\((.*?)\)\)")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv,
}  # fmt: skip
_MOST_ROUNDS = 20  # of variables that name variables
_LONGEST = 100_000  # letters of a command


class Variables(dict[str, str]):
    """Variables of a script, and the names of those of the environment whose defaults were used."""

    def __init__(self) -> None:
        super().__init__()
        self.defaulted: list[str] = []


@dataclass
class Script:
    """The commands of a shell script that have flags, and its variables.

    A flag that stands in a branch begins with ``--?``; a variable that branches give several values
    stays as ``${NAME}``.
    """

    commands: list[list[str]]
    variables: Variables
    slurm: list[str]
    sources: list[str]


def read_script(text: str) -> Script:
    """Return what a shell script would start, as far as it can be told without running it."""
    slurm = " ".join(re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE))
    text = "\n".join(map(_without_comment, _without_documents(text).splitlines()))
    joined = re.sub(r"\\[ \t]*(\n|$)", " ", text)
    script = Script([], Variables(), _words(slurm), [])
    for flag, value in flags_of(script.slurm).items():
        if str(value).isdecimal():  # what Slurm sets for the job
            script.variables |= dict.fromkeys(_SLURM_SETS.get(flag, ()), str(value))
    open_blocks: list[str] = []
    for raw in _whole_values(joined).splitlines():
        for line, perhaps in _statements(raw):
            word = line.split(maxsplit=1)[0] if line.split() else ""
            if word in _CLOSING:
                open_blocks = open_blocks[:-1]
            elif word in {"if", "case", "for", "while", "until"}:
                open_blocks.append(word)
                _take_loop(script, line)
            elif word in {"source", "."}:
                script.sources.append(_expanded(line.split(maxsplit=1)[-1], script.variables))
            elif word not in _SILENT or _BRANCH.match(line):
                branch = perhaps or bool({"if", "case", "while", "until"} & {*open_blocks})
                _take_command(script, line, branch=branch)
    script.commands = [one for one in map(_unwrapped, script.commands) if one]
    return script


_SLURM_SETS = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
}  # fmt: skip
_CLOSING = {"fi", "esac", "done"}
_SILENT = {"echo", "printf", "cat", "mkdir", "cd", "unset", "set", "exit", "then", "else", "do"}
_BRANCH = re.compile(r"^\s*(?:[\w.*|\"-]+\)|then|else|do|\{)\s+")


def _take_command(script: Script, line: str, *, branch: bool) -> None:
    """Take the assignments at the head of a line, and the command behind them."""
    rest = _BRANCH.sub("", line)
    while (found := _ASSIGNMENT.match(rest)) is not None:
        end = found.start(4) + _first_word(found[4])
        if found[1]:  # export NAME=value and the like: whatever follows is no command
            value, rest = found[4], ""
        else:
            value, rest = found[4][: end - found.start(4)], rest[end:]
        _assign(script.variables, (found[2], bool(found[3]), value), branch=branch)
    if rest.strip() and rest.split(maxsplit=1)[0] not in _SILENT:
        script.commands.append(_words(_expanded(rest, script.variables)))


def _first_word(text: str) -> int:
    """Return where the first word of a text ends; quotes and brackets belong to it."""
    quote, depth = "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'`":
            quote = letter
        elif letter in "({":
            depth += 1
        elif letter in ")}":
            depth -= 1
        elif letter.isspace() and depth <= 0:
            return place
    return len(text)


def _statements(line: str) -> list[tuple[str, bool]]:
    """Split a line at what stands between commands, and say which are run only perhaps.

    Quotes and brackets stay whole; behind ``&&`` or ``||`` a command is run or not.
    """
    parts, quote, depth, start, perhaps = [], "", 0, 0, False
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "({":
            depth += 1
        elif letter in ")}":
            depth -= 1
        elif letter in ";&|" and depth <= 0:
            parts.append((line[start:place], perhaps))
            perhaps = bool({line[place : place + 2], line[place - 1 : place + 1]} & {"&&", "||"})
            start = place + 1
    parts.append((line[start:], perhaps))
    return [part for part in parts if part[0].strip()]


def _take_loop(script: Script, line: str) -> None:
    found = re.match(r"\s*for\s+(\w+)\s+in\s+(.*)", line)
    if found is not None:
        values = found[2].split()
        script.variables[found[1]] = values[0] if len(values) == 1 else f"${{{found[1]}}}"


def _assign(variables: Variables, found: tuple[str, bool, str], *, branch: bool) -> None:
    name, adds, text = found
    before, value = variables.get(name), _expanded(_bare(text), variables)
    # What a variable had before the script is not known, and does not come again and again.
    value = re.sub(rf"\$\{{{name}(\[[@*]\])?\}}|\${name}\b", "", value)
    if before is not None and not adds and branch and value.startswith(before) and before:
        adds, value = True, value[len(before) :]
    if adds:
        value = _perhaps(value) if branch else value
        variables[name] = f"{before or ''} {value}".strip()
    elif not branch or value == (before or ""):
        variables[name] = value
    elif before and "--" in before and "--" in value and not re.search(r"\$\(|`", before + value):
        variables[name] = _either(before, value)
    elif before or "--" not in value:  # another value, or none, where the branch is not taken
        variables[name] = f"${{{name}}}"
    else:
        variables[name] = _perhaps(value)


def _either(one: str, other: str) -> str:
    """Return the flags of two branches, each perhaps; a value that they give twice is open."""
    (first, rest), (second, others) = (flags_and_rest(_words(text)) for text in (one, other))
    first, second = ({name.replace("--?", "--"): value for name, value in found.items()}
                     for found in (first, second))  # fmt: skip
    both = first | second
    opens = {name for name in first.keys() & second.keys() if first[name] != second[name]}
    flags = [
        _perhaps(name) + ("" if value is True else f" {'$BRANCH' if name in opens else value}")
        for name, value in both.items()
    ]
    return " ".join(dict.fromkeys([*flags, *rest, *others]))


def _perhaps(text: str) -> str:
    """Mark the flags of a text as such that a branch decides."""
    return re.sub(r"(^|\s)--(?=\w)", r"\1--?", text)


def _unwrapped(words: list[str]) -> list[str]:
    """Take apart a command that is itself an argument, as of ``bash -c``."""
    found: list[str] = []
    for word in words:
        several = " --" in word or ".py " in word or re.match(r"--[\w-]+\s", word)
        found += _words(word) if several else [word]
    return found if any(word.startswith("--") for word in found) else []


def _whole_values(text: str) -> str:
    """Put arrays and quoted texts that stand on several lines on one."""
    place = 0
    while (found := re.compile(r"\w\+?=\(").search(text, place)) is not None:
        start = found.end() - 1
        place = start + _closing(text[start:])
        array = _one_line(text[start:place])
        text, place = text[:start] + array + text[place:], start + len(array)
    return re.sub(
        r"""(\w\+?=)(["'])([^"']*?)\2""",
        lambda m: f"{m[1]}{m[2]}{_one_line(m[3])}{m[2]}" if "\n" in m[3] else m[0],
        text,
    )


def _closing(text: str) -> int:
    """Return the place behind the bracket that closes the one at the start of a text."""
    quote, depth = "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if not depth:
                return place + 1
    return len(text.splitlines()[0])  # never closed: no array


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _without_documents(text: str) -> str:
    """Leave out texts that a script writes to files (``cat <<EOF``)."""
    form = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?\n\s*\2[ \t]*(?=\n|$)", re.DOTALL)
    return form.sub("", text)


def _without_comment(line: str) -> str:
    for found in re.finditer(r"(?:^|(?<=\s))#", line):
        before = line[: found.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            return before
    return line


def _bare(value: str) -> str:
    value = value.strip().rstrip(";")
    if value[:1] == "(" and value[-1:] == ")":
        return value[1:-1]
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value


def _expanded(text: str, variables: Variables) -> str:
    for _ in range(_MOST_ROUNDS):
        before = text
        text = _SUM.sub(lambda m: _summed(m, variables), text)
        text = _WHERE_SET.sub(lambda m: _where_set(m, variables), text)
        text = _VARIABLE.sub(lambda m: _value_of(m, variables), text)
        if text == before or len(text) > _LONGEST:
            break
    return text


def _where_set(found: re.Match[str], variables: Variables) -> str:
    """Return the text that stands where a variable is set; one not known decides at launch."""
    if found[1] in variables:
        return _bare(found[2]) if variables[found[1]] else ""
    return _perhaps(_bare(found[2])) if "--" in found[2] else f"${found[1]}"


def _value_of(found: re.Match[str], variables: Variables) -> str:
    default = found[0] if found[2] is None else _bare(found[2])
    name = found[1] or found[3]
    value = variables.get(name, default)
    if name not in variables and found[2] is not None:
        variables.defaulted.append(name)
    return default if not value and found[2] is not None else value


def _summed(found: re.Match[str], variables: Variables) -> str:
    inner = _VARIABLE.sub(lambda m: _value_of(m, variables), found[1])
    inner = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], "?"), inner)
    try:
        return str(_value(ast.parse(inner.replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return found[0]


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that another line closes, and no part of a word
        return [plain for word in line.split() if (plain := word.strip("\"'"))]


_FLAG = re.compile(r"--\??[A-Za-z]")
# Words that stand for flags which another place gives: "$@", ${EXTRA_ARGS[@]}, $MORE_OPTS.
_ELSEWHERE = re.compile(
    r"\$[@*]|\$\{[@*]\}|\$\{\w+\[[@*]\]\}|\$\{?\w*(ARG|OPT|FLAG|EXTRA|PARAM|CONFIG)\w*\}?",
    re.IGNORECASE,
)
_UNKNOWN_WORD = re.compile(r"\$\{?\w+\}?|\$\(.*\)|`.*`")
_SHORT = re.compile(r"-[A-Za-z]")
_SEVERAL = re.compile(r"data_path|blend|data_args|rampup|recompute_modules|offload_modules")


def flags_of(words: list[str]) -> dict[str, Any]:
    """Return the flags of a command's words with their values; one without a value is True.

    ``--tensor-model-parallel-size 8`` is ``{"--tensor-model-parallel-size": "8"}``; of a flag that
    is given twice the last counts.
    """
    return flags_and_rest(words)[0]


def flags_and_rest(
    words: list[str], is_switch: Callable[[str], bool] = lambda _: False
) -> tuple[dict[str, Any], list[str]]:
    """Return the flags of a command's words, and the words that belong to none.

    Args:
        words: The words.
        is_switch: Whether a flag of this name (``sequence_parallel``) takes no value.
    """
    found: dict[str, Any] = {}
    rest: list[str] = []
    name, values = "", []
    for word in _without_redirection(words):
        if _FLAG.match(word):
            name, given, value = word.partition("=")
            values = [value] if given else []
            found[name] = value if given else True
            continue
        plain = name[2:].lstrip("?").replace("-", "_")
        full = not name or found[name] is not True
        more = full and not (name and values and _SEVERAL.search(plain))
        if (
            not name
            or _ELSEWHERE.fullmatch(word)
            or (_SHORT.match(word) and not _NEGATIVE.match(word))
            or (more and _UNKNOWN_WORD.fullmatch(word))
            or (is_switch(plain) and word.lower() not in _SAID)
        ):
            rest.append(word)
            continue
        values = [*values, word]
        found[name] = " ".join(values)
    return found, rest


_SAID = {"true", "false", "1", "0", "yes", "no", "on", "off"}
_NEGATIVE = re.compile(r"-(\d|\.\d|inf)")


def _without_redirection(words: list[str]) -> list[str]:
    """Leave out where a command's output goes."""
    kept: list[str] = []
    skips = False
    for word in words:
        sign = re.match(r"\d*(>>?|<)&?([^>]*)$", word)
        if skips or sign is not None:
            skips = sign is not None and not sign[2] and not word.endswith("&")
            continue
        kept.append(word)
    return kept


def leaves(table: Mapping[str, Any], *, above: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their full names, such as ``model.hidden_size``."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, above=f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def python_settings(text: str) -> dict[str, Any] | None:
    """Return the settings of a Python module for torchtitan; None where it is none.

    Arguments of ``ParallelismConfig`` and what is assigned to ``config.training`` and
    ``config.activation_checkpoint`` are read; the model is the function that it starts from.
    """
    if "ParallelismConfig" not in text:
        return None
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        message = f"the module is not Python: {error.msg}, line {error.lineno}"
        raise DataError(message, hint="mend that line") from error
    found: dict[str, Any] = {"activation_checkpoint.mode": "none"}
    found["activation_checkpoint.selective_ac_option"] = "op"
    for node in _walked(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "ParallelismConfig":
            for word in node.keywords:
                if word.arg is not None:
                    found[word.arg] = literal(word.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").endswith("config_registry"):
            found["config_function"] = node.names[0].name
        elif isinstance(node, ast.Assign):
            found |= _assigned(node)
    return found if "config_function" in found else None


def _walked(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module; of two releases' names for the same, the newer one's."""
    yield tree
    test = ast.unparse(tree.test) if isinstance(tree, ast.If) else ""
    older = isinstance(tree, ast.If) and test.startswith("hasattr(") and tree.orelse
    for node in tree.orelse if older else ast.iter_child_nodes(tree):  # type: ignore[attr-defined]
        yield from _walked(node)


def _assigned(node: ast.Assign) -> dict[str, Any]:
    target = node.targets[0]
    if not isinstance(target, ast.Attribute) or (
        isinstance(node.value, ast.Call) and _name(node.value.func) == "ParallelismConfig"
    ):  # whose arguments are read
        return {}
    if target.attr == "activation_checkpoint":
        text = ast.unparse(node.value)
        modes = {"SelectiveAC": "selective", "FullAC": "full"}
        mode = next((mode for name, mode in modes.items() if name in text), "none")
        return {"activation_checkpoint.mode": mode}
    return {target.attr: literal(node.value)}


def literal(node: ast.expr) -> Any:
    """Return a value that stands in the text; what is computed, as its text in braces."""
    try:
        return _value(node) if isinstance(node, ast.BinOp) else ast.literal_eval(node)
    except (ValueError, TypeError, ZeroDivisionError):
        return f"{{{ast.unparse(node)}}}"


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
