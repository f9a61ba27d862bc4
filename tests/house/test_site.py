"""What `make docs` does not see: the citation's version, pages that code names, public names that the reference lacks,
and its own staging."""

import importlib
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from verl_credit import credit
from verl_credit.credit import laws, plugins
from verl_credit.records import lineage

ROOT = Path(__file__).parents[2]


def test_the_citation_names_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


NAMED = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
CODE = (
    "verl_credit/**/*.py",
    "retriever/**/*.py",
    "recipes/**/*.yaml",
    "evidence/**/*.py",
    ".ci/*",
    "Makefile",
    "*.toml",
)


def anchors(page: Path) -> set[str]:
    """As GitHub and the site name the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_pages(text: str) -> set[str]:
    """The pages and headings that a text names as docs/PAGE.md#HEADING and that are not there."""
    found = {one: (ROOT / one.partition("#")[0], one.partition("#")[2]) for one in NAMED.findall(text)}
    return {
        one
        for one, (page, heading) in found.items()
        if not page.is_file() or (heading and heading not in anchors(page))
    }


def test_the_pages_that_code_and_messages_name_are_there():
    files = [path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file()]
    texts = {path: path.read_text(errors="replace") for path in files}
    assert sum("docs/" in text for text in texts.values()) > 20
    assert {path: lost for path, text in texts.items() if (lost := missing_pages(text))} == {}


HOST_SIDE = {
    "as_transform_spec",
    "as_uncertainty_spec",
    "find_turn_mode",
    "load",
    "run_algorithm",
    "run_transform",
    "run_uncertainty",
}


@pytest.mark.parametrize("module", [credit, plugins, laws, lineage])
def test_every_public_function_and_class_is_in_the_reference(module):
    pages = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE)
    public = {name: getattr(module, name) for name in module.__all__}
    public = {
        name: found for name, found in public.items() if inspect.isroutine(found) or inspect.isclass(found)
    }
    missing = {
        name
        for name, found in public.items()
        if f"{found.__module__}.{name}" not in shown and found.__module__ not in shown
    }
    assert missing - HOST_SIDE == set()


def examples() -> list[tuple[str, str]]:
    """The examples in Python of the reference and README, but for the search client's, which needs a server."""
    pages = [(name, (ROOT / name).read_text()) for name in ("docs/api.md", "README.md")]
    found = [
        (name, code) for name, page in pages for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ]
    return [(name, code) for name, code in found if "SearchClient(" not in code]


@pytest.mark.slow
@pytest.mark.parametrize("number, name, code", [(n, *one) for n, one in enumerate(examples())])
def test_an_example_of_a_page_runs(number, name, code, tmp_path, monkeypatch):
    """As a module, because the laws pickle an operator."""
    (tmp_path / f"example_{number}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"example_{number}")
    for test in (found for key, found in vars(module).items() if key.startswith("test_")):
        test()


SPEC = importlib.util.spec_from_file_location("stage", ROOT / ".ci" / "site" / "stage.py")
stage = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stage)
CONFIG = ROOT / ".ci" / "site" / "mkdocs.yml"


def test_every_page_is_declared(tmp_path):
    stage.stage(ROOT, tmp_path)
    pages = {page.relative_to(tmp_path).with_suffix(".html").as_posix() for page in tmp_path.rglob("*.md")}
    assert {page.replace("README.html", "index.html") for page in pages} == stage.expected(CONFIG, tmp_path)
