"""The models of examples/models, rewritten by ikbo.rewrite, against themselves; both compiled.

  python -m benchmarks.ops.models [DIR]

compares models.json in DIR (by default benchmarks/results/h200) with what the reports predict.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import ikbo
from ikbo.rewrite import Report

from ..cases import Case, Draw, compiled

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from models import MODELS, Sizes, arguments, contexts  # noqa: E402

NOTE = (
    "Whole models of plain PyTorch, 70 candidates a user: `ikbo` is what `ikbo.rewrite` makes of "
    "them, `original_compiled` the model as it is written, both under `torch.compile`."
)
RATIO = 70
# What a kernel takes in a graph whatever it does: the mean of those of the models as they are
# written that take less than 6 us at B = 1024, 2.5 us, and 0.4 us to the next.
LAUNCH_US = 2.9


def cases(scaled: Callable[[int], int]) -> list[Case]:
    def case(name: str, batch: int) -> Case:
        sizes = _sizes(scaled)
        n = max(2, scaled(batch))

        def inputs(draw: Draw) -> SimpleNamespace:
            model = _model(name, sizes, draw.device, draw.dtype)
            users = -(-n // RATIO)
            with torch.random.fork_rng(), torch.inference_mode(False):
                torch.manual_seed(draw.integers(0, 1 << 30, 1).item())
                given = arguments(model, sizes, n, users, draw.device, draw.dtype)
            given["user_index"] = (torch.arange(n) // RATIO).to(draw.device)
            return SimpleNamespace(model=(name, sizes, draw.device, draw.dtype), **given)

        contestants = {"ikbo": _call(_rewritten), "original_compiled": _call(_model)}
        # By graphs, however long: how fast a host launches so many kernels isn't the question.
        return Case(f"{name}_B{batch}_r{RATIO}", inputs, contestants, by_graphs=True)

    return [case(name, batch) for name in MODELS for batch in (1024, 4096)]


def _sizes(scaled: Callable[[int], int]) -> Sizes:
    full = Sizes()
    return Sizes(
        user_features=max(2, scaled(full.user_features)),
        candidate_features=max(2, scaled(full.candidate_features)),
        query_features=max(2, scaled(full.query_features)),
        dense_features=max(2, scaled(full.dense_features)),
        history=max(4, scaled(full.history)),
        dim=max(8, scaled(full.dim)),
        mlp=tuple(max(8, scaled(n)) for n in full.mlp),
        vocabulary=1000,
    )


@functools.cache
def _model(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> nn.Module:
    with torch.inference_mode(False), torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name](sizes).eval().requires_grad_(False).to(device, dtype)


@functools.cache
def _report(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Report:
    model = _model(name, sizes, device, dtype)
    with torch.inference_mode(False):
        given = arguments(model, sizes, 6, 3, device, dtype)
        return ikbo.rewrite(model, given, contexts(model), ["candidate_ids"])[1]


@functools.cache
def _rewritten(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> nn.Module:
    with torch.inference_mode(False):
        return _report(name, sizes, device, dtype).rewritten.module(check_guards=False)


def _call(program: Callable[..., nn.Module]) -> Callable[[Any], Callable[[], Tensor]]:
    def make(i: Any) -> Callable[[], Tensor]:
        given = {n: t for n, t in vars(i).items() if n != "model"}
        run = compiled(program(*i.model))
        return lambda: run(**given)

    return make


def main() -> None:
    """How often as fast each model is, and how much of that its report predicts."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks/results/h200"
    result = json.loads((folder / "models.json").read_text())
    ceilings = {n: result["meta"][n] for n in ("copy_TBps", "matmul_TFLOPS")}
    ceilings["launch_us"] = LAUNCH_US
    # As it was measured, if there is such a GPU: on a CPU some copies are made in pieces.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speedups = []
    for row in result["rows"]:
        if row["impl"] != "original_compiled" or row["dtype"] != "bf16" or "ratio" not in row:
            continue
        name, batch = row["case"].removesuffix(f"_r{RATIO}").rsplit("_B", 1)
        report = _report(name, _sizes(lambda n: n), device, torch.bfloat16)
        users = -(-int(batch) // RATIO)
        sizes = {"user": users, "query": users + 1, "candidates": int(batch)}
        predicted = report.speedup(**ceilings, **{n: sizes[n] for n in report.inputs.sizes})
        speedups.append(row["ratio"])
        print(f"{row['case']}: {row['ratio']:.2f}x, predicted {predicted:.2f}x, "
              f"{row['ratio'] / predicted:.2f} of it")  # fmt: skip
    print(f"geometric mean {statistics.geometric_mean(speedups):.2f}x, least {min(speedups):.2f}x")


if __name__ == "__main__":
    main()
