"""Where one line of a function can be broken: every place of a source file, as (line, columns, new text).

Left alone: signatures, annotations, decorators, docstrings and other texts, what is raised or logged, `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARE = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: (r"\*\*", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: (r"\|", "&"),
}  # fmt: skip
OTHER_NAME = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin",
              "any": "all", "all": "any"}  # fmt: skip
LOGS = {"log", "logger", "logging", "warnings", "print"}
Edit = tuple[str, int, int, int, str]  # kind, line, first column and end of what goes (bytes), what comes


@dataclass(frozen=True)
class Place:
    file: str
    line: int
    kind: str
    before: str  # the whole line
    after: str


def places(file: str, source: str) -> list[Place]:
    """In the order of the file."""
    lines = source.encode().splitlines()
    found = []
    for kind, number, begin, end, text in _edits(ast.parse(source), lines, inside=False):
        line = lines[number - 1]
        mutated = line[:begin] + text.encode() + line[end:]
        found.append(Place(file, number, kind, line.decode(), mutated.decode()))
    return list(dict.fromkeys(found))


def _edits(node: ast.AST, lines: list[bytes], inside: bool) -> Iterator[Edit]:
    if inside:
        yield from (edit for edit in _edits_of(node, lines) if edit is not None)
    for child in _mutable(node):
        yield from _edits(
            child, lines, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )


def _mutable(node: ast.AST) -> list[ast.AST]:
    """The parts of a node in which something may be broken."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.body
        case ast.Lambda():
            return [node.body]
        case ast.Raise() | ast.JoinedStr():
            return []
        case ast.Assert():
            return [node.test]
        case ast.Call() if _is_log(node):
            return []
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return node.orelse
    return list(ast.iter_child_nodes(node))


def _is_log(call: ast.Call) -> bool:
    name = call.func
    while isinstance(name, ast.Attribute):
        name = name.value
    return isinstance(name, ast.Name) and name.id.strip("_").lower() in LOGS


def _edits_of(node: ast.AST, lines: list[bytes]) -> Iterator[Edit | None]:
    match node:
        case ast.Compare():
            for left, op, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                yield _between("comparison", left, right, *COMPARE[type(op)], lines)
        case ast.BinOp() if type(node.op) in ARITHMETIC and not (_is_text(node.left) or _is_text(node.right)):
            yield _between("arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)], lines)
        case ast.AugAssign() if type(node.op) in ARITHMETIC and not _is_text(node.value):
            yield _between("arithmetic", node.target, node.value, *ARITHMETIC[type(node.op)], lines)
        case ast.BoolOp():
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield _between("and, or", left, right, old, new, lines)
        case ast.UnaryOp():
            sign = 4 if isinstance(node.op, ast.Not) else 1
            yield "not, minus", node.lineno, node.col_offset, node.col_offset + sign, ""
        case ast.Constant(value=bool()):
            yield _whole("constant", node, str(not node.value))
        case ast.Constant(value=int() | float()):
            yield _whole("constant", node, repr(node.value + 1))
        case ast.Return(value=ast.AST()) if not _is_none(node.value):
            yield _whole("return", node, "return None")
        case ast.Expr(value=ast.Call() | ast.Await()) if not _is_log(_call(node.value)):
            yield _whole("call dropped", node, "pass")
        case ast.Name() | ast.Attribute():
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in OTHER_NAME and isinstance(node.ctx, ast.Load):
                begin = node.end_col_offset - len(name)
                yield "min, max, any, all", node.end_lineno, begin, node.end_col_offset, OTHER_NAME[name]
        case ast.Slice():
            yield from (_whole("slice", bound, "") for bound in (node.lower, node.upper) if bound is not None)


def _call(value: ast.expr) -> ast.AST:
    call = value.value if isinstance(value, ast.Await) else value
    return call if isinstance(call, ast.Call) else ast.Call(func=ast.Name("_"), args=[], keywords=[])


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _whole(kind: str, node: ast.AST, text: str) -> Edit | None:
    """The node, where it stands on one line."""
    if node.lineno != node.end_lineno:
        return None
    return kind, node.lineno, node.col_offset, node.end_col_offset, text


def _between(kind: str, left: ast.AST, right: ast.AST, old: str, new: str, lines: list[bytes]) -> Edit | None:
    """The operator between two parts, on whichever line it stands."""
    for number in range(left.end_lineno, right.lineno + 1):
        line = lines[number - 1]
        begin = left.end_col_offset if number == left.end_lineno else 0
        end = right.col_offset if number == right.lineno else len(line)
        if found := re.search(old.encode(), line[begin:end].split(b"#")[0]):
            return kind, number, begin + found.start(), begin + found.end(), new
    return None
