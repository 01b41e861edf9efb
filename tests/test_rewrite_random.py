"""ikbo.rewrite on random models, shapes and maps: equal results, or left alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo.rewrite import Report
from ikbo.rewrite.algebra import registry
from ikbo.testing import RandomModel

from .test_rewrite import (
    ActivationUnit,
    TargetAttention,
    Tower,
    _rewrite,
)

USER = {"user": ikbo.Context(inputs=["user"], map="user_index")}


def _inputs(n_users: int, n_candidates: int) -> tuple[Tensor, ...]:
    user, candidate = torch.randn(n_users, 3, 4), torch.randn(n_candidates, 3, 4)
    return user, candidate, torch.randint(0, n_users, (n_candidates,))


class Several(nn.Module):
    """Random models side by side, of the same weights: exporting them at once is quicker."""

    def __init__(self, seeds: range) -> None:
        super().__init__()
        self.models = nn.ModuleList(RandomModel(seed) for seed in seeds)
        first = self.models[0]
        for model in self.models:
            model._modules, model._parameters = first._modules, first._parameters

    def forward(self, user: Tensor, candidate: Tensor, user_index: Tensor) -> list[Tensor]:
        return [model(user, candidate, user_index) for model in self.models]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch writes thousands of debug records an export, and pytest would keep them."""
    logging.disable(logging.DEBUG)
    yield
    logging.disable(logging.NOTSET)


GROUPS, EACH = 30, 10


@pytest.mark.no_cover
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_models(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 models, half of them as for a GPU: equal results, or left alone."""
    monkeypatch.setattr(registry, "counts_launches", lambda device: group % 2 == 1)
    model = Several(range(group * EACH, (group + 1) * EACH)).eval()
    _, report = ikbo.rewrite(model, _inputs(3, 7), USER, ["candidate"])
    for sizes in ((1, 1), (5, 23)):
        report.verify(_inputs(*sizes))
    # That some do move: a pass that leaves all alone would pass this test.
    assert report.of("sunk")


@functools.cache
def _report(kind: str) -> tuple[Report, tuple[int, ...]]:
    tokens = (5, 8)
    models: dict[str, tuple[Any, tuple[int, ...]]] = {
        "tower": (Tower(), (8,)),
        "activation unit": (ActivationUnit(), tokens),
        "target attention": (TargetAttention(False), tokens),
    }
    model, sizes = models[kind]
    return _rewrite(model.eval(), *sizes)[1], sizes


KINDS = ["tower", "activation unit", "target attention"]


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(deadline=None, max_examples=10)
@hypothesis.given(data=st.data())
def test_any_shapes_and_maps(kind: str, data: st.DataObject) -> None:
    report, sizes = _report(kind)
    n_users = data.draw(st.integers(1, 9), label="users")
    rows = st.integers(-n_users, n_users - 1)
    index = data.draw(st.lists(rows, min_size=1, max_size=30), label="map")
    torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
    user, candidate = torch.randn(n_users, *sizes), torch.randn(len(index), 8)
    report.verify((user, candidate, torch.tensor(index)))
