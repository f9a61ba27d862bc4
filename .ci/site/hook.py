"""Gives the site the folders of the repository: docs/, evidence/, and the pages at the top."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "evidence/**/*.md")
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")


def on_files(files, config):
    """The pages, and every file of the repository that one of them links to."""
    for file in list(files):
        if file.abs_src_path and Path(file.abs_src_path).is_relative_to(ROOT / "docs"):
            files.remove(file)  # it comes back below its folder
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    linked = {
        target
        for page in pages
        for link in LINK.findall(page.read_text())
        if (target := (page.parent / link).resolve()).is_file() and target.is_relative_to(ROOT)
    }
    for path in [*pages, *sorted(linked.difference(pages))]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, "site.css", abs_src_path=str(Path(__file__).with_name("site.css"))))
    return files
