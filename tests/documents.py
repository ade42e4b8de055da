"""The Python blocks and links of a document."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
]


def text_of(document):
    return (ROOT / document).read_text(encoding="utf-8")


def python_blocks(document):
    """The blocks of Python, in order."""
    return re.findall(r"^```python\n(.*?)^```$", text_of(document), re.M | re.S)


def programs_with_output(document):
    """The blocks of Python, each with the block below it of what it prints."""
    programs = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", text_of(document), re.M | re.S
    )
    assert len(programs) == len(python_blocks(document))
    return programs


def links_of(text):
    """The targets of Markdown links outside of code."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def headings_of(text):
    """The anchors that GitHub gives to the headings of a document."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", prose, re.M)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
