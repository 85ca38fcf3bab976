"""The page about the package: README.md without its links to other files, which are not there on an index."""

import re
from pathlib import Path

from setuptools import setup

_README = Path(__file__).with_name("README.md").read_text("utf-8")

setup(
    long_description=re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", _README),
    long_description_content_type="text/markdown",
)
