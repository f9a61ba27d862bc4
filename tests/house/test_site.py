"""What `make docs` does not see: the citation's version, and public names that the reference lacks."""

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from verl_credit import credit, lineage
from verl_credit.credit import laws, plugins

ROOT = Path(__file__).parents[2]


def test_the_citation_names_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


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
