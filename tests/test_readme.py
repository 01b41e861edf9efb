"""The README holds: its example runs as printed, its table names every op, its links lead there."""

from __future__ import annotations

import re

import torch

import ikbo

from .installed import REPOSITORY, run_python

README = (REPOSITORY / "README.md").read_text()


def test_example_runs_as_printed() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 15
    done = run_python(example)
    assert done.returncode == 0, done.stderr
    assert f"It prints `{done.stdout.strip()}`." in README


def test_op_table_names_every_op() -> None:
    table = README.split("## Ops")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    registered = {
        schema.name.removeprefix("ikbo::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("ikbo::")
    }
    assert len(named) == len(set(named))
    assert set(named) == {op for op in registered if not op.endswith(("_fwd", "_bwd"))}
    assert {name for name in named if not hasattr(ikbo, name)} == set()


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / target).exists(), target


def test_commands_are_targets_of_the_makefile() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"make (demo|test|wheel|bench|lint|\w+)`", README)):
        assert f"\n{target}:" in makefile, target


def test_figures_have_a_place() -> None:
    assert re.search(r"<!-- figures -->\n(.*\n)*<!-- /figures -->", README)
