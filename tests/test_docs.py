"""The pages in docs/ hold: their examples run as printed, their links lead there."""

from __future__ import annotations

import pathlib
import re

import pytest

from .installed import REPOSITORY, run_python

PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_examples_run_as_printed(page: pathlib.Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    done = run_python("\n".join(examples))
    assert done.returncode == 0, done.stderr


@every_page
def test_links_lead_there(page: pathlib.Path) -> None:
    text = page.read_text()
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\(([^):]+)\)", text):
        file, _, anchor = target.partition("#")
        assert (page.parent / file).exists() if file else anchor in headings, target
