"""Schemas are a contract with stored programs: tests/schemas.txt holds every one of them.

Arguments may be appended, with a default; nothing else may change. After an addition,
`python -m tests.test_schemas` rewrites the file.
"""

from __future__ import annotations

import torch

import ikbo  # noqa: F401  (registers the ops)

from .installed import REPOSITORY

SNAPSHOT = REPOSITORY / "tests/schemas.txt"


def _schemas() -> list[str]:
    every = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in every if schema.name.startswith("ikbo::"))


def _key(schema: torch.FunctionSchema) -> tuple[str, str]:
    return schema.name, schema.overload_name


def _argument(argument: torch.Argument) -> tuple[object, ...]:
    default = argument.default_value if argument.has_default_value() else "none given"
    return argument.name, str(argument.type), str(default), argument.kwarg_only


def _changes(old: str, new: str) -> list[str]:
    """What of the old schema the new one breaks."""
    before, after = torch._C.parse_schema(old), torch._C.parse_schema(new)
    found = []
    kept = after.arguments[: len(before.arguments)]
    if [_argument(a) for a in kept] != [_argument(a) for a in before.arguments]:
        found.append("an existing argument changed")
    if not all(a.has_default_value() for a in after.arguments[len(before.arguments) :]):
        found.append("an appended argument has no default")
    if [str(r.type) for r in before.returns] != [str(r.type) for r in after.returns]:
        found.append("a result changed")
    return found


def test_stored_programs_still_fit() -> None:
    now = {_key(torch._C.parse_schema(text)): text for text in _schemas()}
    for old in SNAPSHOT.read_text().splitlines():
        new = now.get(_key(torch._C.parse_schema(old)))
        assert new is not None, f"gone: {old}"
        assert not _changes(old, new), f"{_changes(old, new)}\nwas {old}\nis  {new}"


def test_snapshot_is_complete() -> None:
    assert _schemas() == SNAPSHOT.read_text().splitlines(), "python -m tests.test_schemas"


def test_changes_are_noticed() -> None:
    old = "ikbo::f(Tensor x, int n=1) -> Tensor"
    assert not _changes(old, "ikbo::f(Tensor x, int n=1, str mode='a') -> Tensor")
    for new in (
        "ikbo::f(Tensor x, int n=2) -> Tensor",
        "ikbo::f(Tensor y, int n=1) -> Tensor",
        "ikbo::f(Tensor? x, int n=1) -> Tensor",
        "ikbo::f(Tensor x) -> Tensor",
        "ikbo::f(Tensor x, str mode='a', int n=1) -> Tensor",
        "ikbo::f(Tensor x, int n=1, *, Tensor w) -> Tensor",
        "ikbo::f(Tensor x, int n=1) -> (Tensor, Tensor)",
    ):
        assert _changes(old, new), new


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(_schemas()) + "\n")
