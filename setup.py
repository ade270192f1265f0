"""The one thing that pyproject.toml cannot say: the README with links that work outside of the repository."""

import re
from pathlib import Path

from setuptools import setup

FILES = "https://github.com/shoal-train/shoal/blob/main/"
PICTURES = "https://raw.githubusercontent.com/shoal-train/shoal/main/"
_LINK = re.compile(r"(\]\(|(?:href|src)=\")(?:\./)?(?!https?:|mailto:|#)([^)\"\s]+)")


def absolute(link: re.Match[str]) -> str:
    """A link to a file of the repository as one to its home page."""
    is_picture = Path(link[2]).suffix in {".gif", ".jpg", ".png", ".svg", ".webp"}
    return f"{link[1]}{PICTURES if is_picture else FILES}{link[2]}"


setup(
    long_description=_LINK.sub(absolute, Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
