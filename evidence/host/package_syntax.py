"""A package of Python as syntax: its modules, what their names are, and the members of its classes. Nothing is imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path


class Sources:
    """Python modules below a folder or in a wheel, parsed when they are needed."""

    def __init__(self, path: Path, package: str) -> None:
        self.path = path / package if (path / package / "__init__.py").exists() else path
        self.package, self.wheel = package, zipfile.ZipFile(path) if path.suffix == ".whl" else None

    @cached_property
    def names(self) -> set[str]:
        """The modules, by their dotted names."""
        if self.wheel:
            files = [Path(name) for name in self.wheel.namelist() if name.startswith(f"{self.package}/")]
        else:
            files = [Path(self.package, found.relative_to(self.path)) for found in self.path.rglob("*.py")]
        return {dotted(file) for file in files if file.suffix == ".py"}

    @cached_property
    def version(self) -> str:
        within = "verl/version/version"
        if self.wheel:
            return self.wheel.read(within).decode().strip()
        return (self.path.parent / within).read_text().strip()

    @cache  # noqa: B019  (a handful of objects, as long as the process)
    def tree(self, module: str) -> tuple[ast.Module, bool] | None:
        """(syntax, whether it is a package); None where there is no such module."""
        base = module.replace(".", "/")
        for file, package in ((f"{base}.py", False), (f"{base}/__init__.py", True)):
            try:
                text = self.wheel.read(file).decode() if self.wheel else (self.path.parent / file).read_text()
            except (KeyError, FileNotFoundError):
                continue
            return ast.parse(text), package
        return None

    @cache  # noqa: B019
    def scope(self, module: str) -> dict[str, ast.AST | tuple[str, str | None]]:
        """What each name of a module is: its definition, or (module, name) of an import."""
        if (known := self.tree(module)) is None:
            return {}
        found: dict = {}
        for node in _statements(known[0]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for local, target in imported(node, module, known[1]):
                    found |= self.scope(target[0]) if local == "*" else {local: target}
            else:
                found |= {name: node for name in assigned(node) if name not in found}
        return found

    def resolve(self, module: str, name: str | None) -> tuple[str, ast.AST | None] | None:
        """(module, definition) of a name, through re-exports; the definition of a module is None."""
        if name is None:
            return (module, None) if self.tree(module) else None
        node = self.scope(module).get(name)
        if isinstance(node, tuple):
            # What another package defines is only known to be imported here.
            outside = node[0].split(".")[0] != self.package
            return (module, ast.Name(name)) if outside else self.resolve(*node)
        if node is not None:
            return module, node
        return self.resolve(f"{module}.{name}", None)

    def base(self, module: str, base: ast.expr) -> tuple[str, ast.AST | None] | None:
        """(module, definition) of an expression among the bases of a class."""
        holder, _, last = dotted_name(base).removesuffix(".__ray_actor_class__").rpartition(".")
        if not holder:
            return self.resolve(module, last)
        target = self.scope(module).get(holder)
        return self.resolve(".".join(filter(None, target)), last) if isinstance(target, tuple) else None

    @cache  # noqa: B019
    def ancestors(self, module: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
        """The class and those it extends within this package, nearest first."""
        found = [(module, node)]
        for base in node.bases:
            place = self.base(module, base)
            if place and isinstance(place[1], ast.ClassDef):
                found += [one for one in self.ancestors(*place) if one not in found]
        return found

    def member(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.ClassDef, ast.AST] | None:
        """(module, class, definition) of a method or value of a class."""
        for place, owner in self.ancestors(module, node):
            if name in (members := members_of(owner)):
                return place, owner, members[name]
        return None


@cache
def members_of(node: ast.ClassDef) -> dict[str, ast.AST]:
    """The methods and values of a class itself: those of its body first, then what its methods assign to self."""
    found: dict[str, ast.AST] = {}
    for one in node.body:
        names = [one.name] if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) else assigned(one)
        found |= dict.fromkeys(names, one)
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and (name := of_self(one)):
            found.setdefault(name, one)
    return found


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module, those below an if, a try or a with included."""
    for one in ast.iter_child_nodes(node):
        yield one
        if isinstance(one, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(one)


def imported(node: ast.Import | ast.ImportFrom, module: str, package: bool) -> Iterator[tuple[str, tuple]]:
    """(local name, (module, name)) of each name that a statement imports."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            whole = alias.name if alias.asname else alias.name.split(".")[0]
            yield alias.asname or whole, (whole, None)
        else:
            yield alias.asname or alias.name, (absolute(node, module, package), alias.name)


def dotted_name(node: ast.AST) -> str:
    """Returns a.b.c for an expression that is a name or attributes of a name, else an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def of_self(node: ast.AST) -> str | None:
    """NAME of ``self.NAME`` and ``super().NAME``."""
    if not isinstance(node, ast.Attribute):
        return None
    of = node.value.func if isinstance(node.value, ast.Call) else node.value
    return node.attr if isinstance(of, ast.Name) and of.id in ("self", "super") else None


def assigned(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign):
        return [at.id for target in node.targets for at in ast.walk(target) if isinstance(at, ast.Name)]
    return [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []
