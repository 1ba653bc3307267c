"""A hook of mkdocs: files of the repository that pages link to become files of the site.

A page links to a file outside ``docs/`` as a reader of the repository sees it, for example ``../examples/fsdp2.py``.
The site has no parent folder, so the file is added to the site and the link loses its ``../``.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\((?:\.\./)+((?:examples|benchmarks)/[^)#]+|[A-Z]+\.(?:md|cff))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the linked files to the site."""
    linked = {name for page in Path(config.docs_dir).glob("*.md") for name in _LINK.findall(page.read_text())}
    for name in sorted(linked):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page in ``docs/`` at them."""
    return _LINK.sub(r"](\1", markdown) if "/" not in page.file.src_uri else markdown
