"""The site, which `make docs` builds: the README as its first page, the pages of this folder, and the reference."""

import re
import tomllib
from pathlib import Path

from headrace import __version__

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

project = author = copyright = "headrace"
version = release = __version__
html_title = f"headrace {version}"
html_theme = "furo"
html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
default_role = "code"  # docstrings have names in single backticks, as Markdown has
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True
napoleon_custom_sections = [(name, "params_style") for name in ("Fetching", "Placement", "Results", "Device", "Ranks")]


def with_links_of_the_site(text, folder):
    """Links to files that are no pages of the site lead to the repository."""

    def link(match):
        target, anchor = (folder / match[1]).resolve(), match[2] or ""
        if target.is_dir() and (target / "README.md").exists():
            target /= "README.md"
        if target.is_relative_to(ROOT / "docs"):
            return f"](/{target.relative_to(ROOT / 'docs')}{anchor})"
        kind = "tree" if target.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}{anchor})"

    return re.sub(r"\]\((?!https?://|#)([^)#\s]+)(#[^)\s]+)?\)", link, text)


def read(app, page, source):
    """Prepare the text of a page."""
    if page == "index":
        source[0] = with_links_of_the_site((ROOT / "README.md").read_text(), ROOT) + source[0]
    else:
        source[0] = with_links_of_the_site(source[0], Path(app.srcdir, page).parent)
    if page == "design/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n0*\n```\n"


def setup(app):
    """Connect to Sphinx."""
    app.connect("source-read", read)
