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
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
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


# the search page's example needs a server
@pytest.mark.parametrize(
    "name", ["docs/api/credit.md", "docs/api/laws.md", "docs/api/lineage.md", "README.md"]
)
def test_the_examples_of_a_page_run(name, tmp_path, monkeypatch):
    """As modules, because the laws pickle an operator."""
    page, name = (ROOT / name).read_text(), Path(name).stem
    (tmp_path / f"page_{name}.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"page_{name}")
    for test in (found for key, found in vars(module).items() if key.startswith("test_")):
        test()


SPEC = importlib.util.spec_from_file_location("stage", ROOT / ".ci" / "site" / "stage.py")
stage = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stage)
CONFIG = ROOT / ".ci" / "site" / "mkdocs.yml"


def test_the_staged_folder_has_the_pages_and_what_they_link_to(tmp_path):
    root, staged = tmp_path / "root", tmp_path / "staged"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text(
        "[page](docs/a.md) [code](code.py#L3) [web](https://x.org/b.py) ![p](docs/p.svg)"
    )
    (root / "docs" / "a.md").write_text("[outside](../../outside.txt) [up](../README.md)")
    for name in ("code.py", "docs/p.svg", "not_linked.py", "../outside.txt"):
        (root / name).write_text(name)
    staged.mkdir()
    (staged / "old.md").write_text("a page of an earlier build")
    stage.stage(root, staged)
    found = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
    assert found == {"README.md", "docs/a.md", "code.py", "docs/p.svg", "site.css"}
    assert (staged / "code.py").read_text() == "code.py"


def test_every_page_is_declared(tmp_path):
    stage.stage(ROOT, tmp_path)
    pages = {page.relative_to(tmp_path).with_suffix(".html").as_posix() for page in tmp_path.rglob("*.md")}
    assert {page.replace("README.html", "index.html") for page in pages} == stage.expected(CONFIG, tmp_path)
