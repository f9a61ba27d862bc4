"""Copies the site's pages, and every file that one of them links to, into build/pages. The site is built from that folder.

A file keeps its place in the repository, so that a relative link is the same there, here and in the site.

    python .ci/site/stage.py            # before the build
    python .ci/site/stage.py check      # after it: are the pages in build/site those of mkdocs.yml?
"""

import re
import shutil
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "evidence/**/*.md")
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names a Python function, which is not needed here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def stage(root: Path, staged: Path) -> None:
    pages = [page for pattern in PAGES for page in root.glob(pattern)]
    linked = [(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text())]
    shutil.rmtree(staged, ignore_errors=True)
    for path in {*pages, *(file for file in linked if file.is_file() and file.is_relative_to(root))}:
        place = staged / path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    shutil.copyfile(Path(__file__).with_name("site.css"), staged / "site.css")


def expected(config: Path, staged: Path) -> set[str]:
    """The pages of the navigation, and those that mkdocs.yml leaves out of it by name."""
    declared = yaml.load(config.read_text(), _Loader)
    outside = [page for pattern in declared["not_in_nav"].split() for page in staged.glob(pattern.strip("/"))]
    pages = {*_leaves(declared["nav"]), *(page.relative_to(staged).as_posix() for page in outside)}
    return {
        re.sub(r"(?:README|index)\.md$", "index.md", page).removesuffix(".md") + ".html" for page in pages
    }


def _leaves(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for part in (nav.values() if isinstance(nav, dict) else nav) for leaf in _leaves(part)]


def check(config: Path, staged: Path, site: Path) -> str:
    """What is wrong with the built pages; empty if they are the expected ones."""
    built = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    wanted = expected(config, staged)
    wrong = {"not built": wanted - built, "built, but not in mkdocs.yml": built - wanted}
    return "; ".join(f"{what}: {', '.join(sorted(pages))}" for what, pages in wrong.items() if pages)


if __name__ == "__main__":
    pages, config = ROOT / "build" / "pages", Path(__file__).with_name("mkdocs.yml")
    if sys.argv[1:] == ["check"]:
        sys.exit(check(config, pages, ROOT / "build" / "site") or 0)
    stage(ROOT, pages)
