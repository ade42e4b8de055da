"""A training job: train on objects streamed over HTTP, then compare with torch's loader.

Run it with ``python examples/demo`` in a clone.
"""

import importlib.util

PACKAGES = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "aiohttp": "aiohttp",
    "rich": "rich",
}  # module: package


def missing_packages() -> list[str]:
    """Packages of the extra `demo` that are not installed, by their names on PyPI."""
    return [
        package
        for module, package in PACKAGES.items()
        if importlib.util.find_spec(module) is None
    ]
