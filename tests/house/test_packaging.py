"""The constraints that CI installs from satisfy every range of pyproject.toml, which declares what is imported."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OURS = ("verl_credit", "verl_credit_retriever", "verl_credit_recipes")


def pinned():
    lines = (ROOT / ".ci" / "constraints-cpu.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


def needs(extra):
    """The requirements of an extra, those of the project's own extras in it included."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in map(Requirement, extras[extra]):
        if requirement.name == "verl-credit":
            for other in requirement.extras:
                yield from needs(other)
        else:
            yield requirement


def test_constraints_agree_with_the_declared_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {
        "": list(map(Requirement, project["dependencies"])),
        **{
            name: list(needs(name))
            for name in ("verl", "retriever-ray", "lab", "env", "real", "campaign", "mcp", "dev", "docs")
        },
    }
    versions, wrong = pinned(), []
    for extra, requirements in groups.items():
        for requirement in requirements:
            version = versions.get(canonicalize_name(requirement.name))
            if version is None or version not in requirement.specifier:
                wrong.append(f"[{extra}] {requirement} against {version}")
    assert not wrong


@pytest.mark.slow
def test_every_package_that_is_imported_is_declared():
    """One that merely comes through another could be gone, or of another version, after that one's next release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    declared = {canonicalize_name(Requirement(text).name) for text in named}
    of_module, undeclared = packages_distributions(), set()
    for file in (ROOT / "verl_credit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for module in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - set(OURS):
                if not declared & {canonicalize_name(name) for name in of_module.get(module, [module])}:
                    undeclared.add(module)
    assert undeclared == set()


@pytest.mark.slow
def test_training_imports_nothing_that_only_another_extra_brings():
    """FAISS above all: a search server is often on another machine, and `pip install verl-credit[verl]` lacks it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = {need.name for extra in extras if extra not in ("verl", "dev", "docs") for need in needs(extra)}
    others -= {need.name for need in needs("verl")}
    modules = {module for module, names in packages_distributions().items() if others & set(names)}
    assert {"faiss", "statsmodels", "gguf"} <= modules
    host = ROOT / "verl_credit" / "host"
    pending, seen = [host / "process/verl_checks.py", *host.glob("*.py"), *host.glob("step/*.py")], set()
    while pending:
        seen.add(path := pending.pop())
        names = imported_when_loaded(path)
        assert not (modules & {name.partition(".")[0] for name in names}), path.relative_to(ROOT)
        found = (ROOT / (name.replace(".", "/") + end) for name in names for end in (".py", "/__init__.py"))
        pending += [source for source in found if source.exists() and source not in seen]
    assert ROOT / "verl_credit/study/fidelity/workers.py" in seen


def imported_when_loaded(path):
    """Names of what a file's module level imports."""
    names, pending = set(), list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    return names


def test_no_extra_of_the_retriever_brings_two_wheels_of_one_faiss():
    """faiss-cpu and faiss-gpu-cu12 own the same files: together the one that was installed last wins."""
    wheels = {"retriever": {"faiss-cpu"}, "retriever-gpu": {"faiss-gpu-cu12"}, "retriever-exact": set()}
    for extra, expected in wheels.items():
        names = {requirement.name for requirement in needs(extra)}
        assert {name for name in names if name.startswith("faiss")} == expected
        assert {"fastapi", "transformers", "numpy"} <= names


def test_every_package_is_installed():
    """The list in pyproject.toml is by hand: a folder that it lacks would be missing only where users install."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name: ROOT / folder for name, folder in settings["package-dir"].items()}
    found = {
        ".".join([name, *init.parent.relative_to(folder).parts])
        for name, folder in folders.items()
        for init in folder.rglob("__init__.py")
    }
    assert found == set(settings["packages"])
    data = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(folders.get(package, package.replace(".", "/"))).glob(pattern)
    }
    others = {
        path
        for folder in folders.values()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert others == data
