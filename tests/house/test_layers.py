"""What the contracts of `make lint` cannot say about imports, read from the source, and what lies at the top."""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from verl_credit import credit
from verl_credit.credit import plugins

ROOT = Path(__file__).parents[2]
METHODS = [path for path in sorted((ROOT / "recipes/methods").glob("*.py")) if path.name != "__init__.py"]
TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", "NOTICE", "Makefile",
    "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md",
    "verl_credit", "recipes", "retriever", "tests", "evidence", "docs",
}  # fmt: skip


def python_files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imported_modules(path):
    """Absolute names of everything a file imports, at any depth of nesting."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = (base + (node.module or "")).strip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def offenders(folder, forbidden):
    """`file imports module` for every import in `folder` for which `forbidden(module)`."""
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in python_files(folder)
        for module in imported_modules(path)
        if forbidden(module)
    ]


def within(module, *packages):
    return any(module == package or module.startswith(package + ".") for package in packages)


def in_standard_library(module):
    return module.split(".")[0] in sys.stdlib_module_names


def test_credit_imports_torch_and_nothing_else():
    """Beside them only ``verl_credit.errors`` and ``verl_credit.names``, which import the standard library alone, and
    ``verl_credit.lazy``, which is torch at its first use."""
    ours = ("verl_credit.credit", "verl_credit.errors", "verl_credit.names", "verl_credit.lazy")

    def forbidden(module):
        return not (in_standard_library(module) or within(module, "torch", *ours))

    assert len(python_files("verl_credit/credit")) > 5
    assert not offenders("verl_credit/credit", forbidden)
    for name in ("errors.py", "names.py"):
        assert all(in_standard_library(m) for m in imported_modules(ROOT / "verl_credit" / name))
    lazy = imported_modules(ROOT / "verl_credit" / "lazy.py")
    assert all(in_standard_library(module) or module == "torch" for module in lazy)


def test_what_serves_on_a_cluster_needs_no_verl():
    """It is installed with `retriever-ray` alone: Ray, and nothing else of the host."""
    assert len(python_files("verl_credit/host/deploy")) == 2
    assert not offenders("verl_credit/host/deploy", lambda module: within(module, "verl", "verl_credit"))


def test_the_search_servers_command_line_starts_without_what_only_some_of_its_commands_need():
    """Ray above all: `deploy` alone imports it, when it is called."""
    heavy = ("ray", "verl", "verl_credit", "torch", "numpy", "fastapi", "uvicorn")
    code = f"import sys, verl_credit_retriever.cli; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_recipes_hold_yaml_and_methods():
    """`recipes` is an importable package so that its YAML and its plug-ins are found after an installation."""
    files = {
        path for path in (ROOT / "recipes").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    code = {path.relative_to(ROOT / "recipes") for path in files if path.suffix not in (".yaml", ".yml")}
    methods = {path for path in code if path.parent.name == "methods" and path.name != "__init__.py"}
    assert code - methods == {Path("__init__.py"), Path("methods/__init__.py")}
    assert not any((ROOT / "recipes" / path).read_text() for path in code - methods)


PLUGIN_INTERFACE = {"verl_credit.credit", "verl_credit.turns.rollout.reward.qa", "verl_credit.turns.step.signals.signal",
                    "verl_credit.turns.rollout.thoughts"}  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda path: path.stem)
def test_a_method_is_a_short_plugin_with_a_card(method):
    text, page = method.read_text(), (ROOT / "docs" / "plugins.md").read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 100
    card = ast.get_docstring(tree)
    assert all(part in card for part in ("Paper", "Exact bias", "Own cosine", "Area over GRPO", "Commit: "))
    used = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "verl_credit" in node.module
    }
    assert used <= PLUGIN_INTERFACE and all(name in page for name in used)
    named = [a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "verl_credit.credit"
             for a in node.names]  # fmt: skip
    assert set(named) <= set(credit.__all__)
    assert callable(plugins.load(f"verl_credit_recipes.methods.{method.stem}.{method.stem}", "key"))


def test_the_generator_needs_only_torch_and_transformers():
    """verl_credit/policy/generation.py and what it imports: the lab samples with it, without verl."""
    pending, seen = [ROOT / "verl_credit/policy/generation.py"], set()
    while pending:
        path = pending.pop()
        seen.add(path)
        for module in imported_modules(path):
            if in_standard_library(module) or within(module, "torch", "transformers"):
                continue
            assert within(module, "verl_credit"), f"{path.relative_to(ROOT)} imports {module}"
            source = ROOT / (module.replace(".", "/") + ".py")
            if source.exists() and source not in seen:
                pending.append(source)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["verl_credit", "verl_credit.credit"])
def test_importing_loads_nothing_heavy(module):
    heavy = ("verl", "ray", "hydra", "omegaconf", "transformers")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_top_level_holds_what_it_should():
    ignored = [line.strip().strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    found = {
        path.name
        for path in ROOT.iterdir()
        if not path.name.startswith(".")
        and not any(fnmatch(path.name, pattern) for pattern in ignored if pattern)
    }
    assert found <= TOP_LEVEL
