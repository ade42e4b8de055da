"""The Python blocks of a document."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python_blocks(document):
    """Its blocks of Python, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(encoding="utf-8"), re.M | re.S)
