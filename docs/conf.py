"""The site, which `make docs` builds: the README as its first page, the pages of this folder, and the reference."""

import os
import re
import tomllib
from pathlib import Path

from sphinx_gallery.sorting import ExplicitOrder

from headrace import __version__

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"][
    "Repository"
]

project = author = copyright = "headrace"
version = release = __version__
html_title = f"headrace {version}"
html_theme = "furo"
html_copy_source = False
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
extensions += ["sphinx_gallery.gen_gallery"]
# Names of others in signatures become links.
if os.environ.get("HEADRACE_DOCS_ONLINE") == "1":
    extensions += ["sphinx.ext.intersphinx"]
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", None),
    "numpy": ("https://numpy.org/doc/stable/", None),
    "torch": ("https://docs.pytorch.org/docs/stable/", None),
}
linkcheck_ignore = [
    re.escape(REPOSITORY)
]  # a placeholder; its files are checked by tests/test_documents.py
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
highlight_language = "text"  # of blocks without one
default_role = "code"  # docstrings have names in single backticks, as Markdown has
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
maximum_signature_line_length = 100
napoleon_use_ivar = True
napoleon_custom_sections = [
    (name, "params_style")
    for name in ("Fetching", "Placement", "Results", "Device", "Ranks")
]

# The examples are run for the site; one that has not changed since the last build is not run again.
NOT_RUN = [
    "21",
    "29",
    "30",
]  # what they need is not in the environment of `make docs`; their pages say so
FIRST = "00 26 23 09 27 12 28 29 14 30"
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": rf"/(?!{'|'.join(NOT_RUN)})\d\d_",
    "within_subsection_order": ExplicitOrder(
        sorted(EXAMPLES, key=lambda name: f"{FIRST} {name}".index(name[:2]))
    ),
    "default_thumb_file": str(ROOT / "docs/_static/no-picture.svg"),
    "notebook_extensions": set(),
    "download_all_examples": False,
    "write_computation_times": False,
    "min_reported_time": 1e9,
    "show_signature": False,
}
html_static_path = ["_static"]
html_css_files = ["gallery.css"]


def with_links_of_the_site(text, folder):
    """Links to examples lead to the gallery, those to other files that are no pages of the site to the repository."""

    def link(match):
        target, anchor = (folder / match[1]).resolve(), match[2] or ""
        if target.is_dir() and (target / "README.md").exists():
            target /= "README.md"
        if target == ROOT / "examples":
            return "](/gallery/index.rst)"
        if target.parent == ROOT / "examples" and target.suffix == ".py":
            return f"](/gallery/{target.stem}.rst)"
        if target.is_relative_to(ROOT / "docs"):
            return f"](/{target.relative_to(ROOT / 'docs')}{anchor})"
        kind = "tree" if target.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}{anchor})"

    text = re.sub(r'\b(src|srcset)="docs/_static/', r'\1="_static/', text)
    return re.sub(r"\]\((?!https?://|#)([^)#\s]+)(#[^)\s]+)?\)", link, text)


def read(app, page, source):
    """Prepare the text of a page."""
    if page == "index":
        app.env.note_dependency(ROOT / "README.md")
        source[0] = (
            with_links_of_the_site((ROOT / "README.md").read_text(), ROOT) + source[0]
        )
    else:
        source[0] = with_links_of_the_site(source[0], Path(app.srcdir, page).parent)
    if page == "design/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n0*\n```\n"


def setup(app):
    """Connect to Sphinx."""
    app.connect("source-read", read)
