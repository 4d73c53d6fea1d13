"""Pages of the site that are files at the repository's root: its home (README.md), the changelog and CONTRIBUTING.

MkDocs calls the functions that begin with ``on_`` (mkdocs.yml).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=site_links(text)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links of the pages to files at the root."""
    for source, page in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown


def site_links(text: str) -> str:
    """The text with links as they are on the site: pages in one folder; files that it does not have as plain text."""

    def link(found: re.Match) -> str:
        label, target = found[1], found[2]
        path, hash_sign, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        if path in PAGES:
            return f"[{label}]({PAGES[path]}{hash_sign}{anchor})"
        if path.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        return label

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, text)
