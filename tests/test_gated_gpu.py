"""The Hopper kernels of gated_linear, gated_mlp and linear_act: the definition, shapes, strides,
guards, streams, graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo.testing import assert_matches_definition, definitions

from .memory import peak_bytes
from .test_concat_linear_gpu import guarded, record

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
NAN = float("nan")
OPS = ["gated_linear", "gated_mlp", "linear_act"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
one_dtype = pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)  # nothing in it depends on it
every_op = pytest.mark.parametrize("op", OPS)
every_gated_op = pytest.mark.parametrize("op", OPS[:2])


def call(op: str, args: list[Any]) -> Tensor:
    out: Tensor = getattr(torch.ops.ikbo, op)(*args)
    return out


def run(op: str, args: list[Any]) -> Tensor:
    """The op, which has to run on kernels."""
    out = call(op, args)
    assert record(op)["path"] == "sm90", record(op)
    return out


def draw(dtype: torch.dtype, seed: int) -> Callable[..., Tensor]:
    """Seeded random tensors, drawn on the GPU: these are many and large."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def of_sizes(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator, device="cuda") * scale).to(dtype)

    return of_sizes


def inputs(
    op: str, dtype: torch.dtype, M: int, N: int, K: int, out_features: int = 72, *,
    activation: str = "silu", bias: bool = True, seed: int = 0,
) -> list[Any]:  # fmt: skip
    """The op's arguments, each tensor amid NaN. gated_mlp's N are hidden features."""
    t = draw(dtype, seed)
    into, back = 1 / max(1, K) ** 0.5, 1 / max(1, N) ** 0.5
    x, w_gate, w_up = guarded(t(M, K)), guarded(t(N, K, scale=into)), guarded(t(N, K, scale=into))
    b_gate, b_up = (guarded(t(N)) if bias else None for _ in "gu")
    if op == "linear_act":
        return [x, w_gate, b_gate, activation]
    gated = [x, w_gate, w_up, b_gate, b_up]
    if op == "gated_linear":
        return [*gated, activation]
    w_down = guarded(t(out_features, N, scale=back))
    return [*gated, w_down, guarded(t(out_features)) if bias else None, activation]


def wide(args: list[Any]) -> list[Any]:
    return [a.double() if isinstance(a, Tensor) else a for a in args]


def check(op: str, out: Tensor, args: list[Any]) -> None:
    definition = getattr(definitions, op)
    assert_matches_definition(out, definition(*wide(args)), definition(*args))


def with_activation(args: list[Any], activation: str) -> list[Any]:
    return [*args[:-1], activation]


def leaves_of(args: list[Any]) -> list[Any]:
    return [a.detach().clone().requires_grad_() if isinstance(a, Tensor) else a for a in args]


def tensors_of(args: list[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor)]


def check_gradients(op: str, args: list[Any]) -> None:
    definition = getattr(definitions, op)

    def gradients(function: Any, of: list[Any]) -> list[Tensor]:
        leaves = leaves_of(of)
        out = function(*leaves)
        grad = draw(args[0].dtype, seed=1)(*out.shape).to(out.dtype)
        return list(torch.autograd.grad(out, tensors_of(leaves), grad))

    ours = gradients(getattr(torch.ops.ikbo, op), args)
    exact, plain = gradients(definition, wide(args)), gradients(definition, args)
    # Gradients of a few tokens hang on a few roundings, which plain PyTorch can be lucky with: of
    # 300 draws with equal roundings the worst was 2.1 times the usual bound.
    multiple = 2.0 if len(args[0]) > 50 else 5.0
    for got, want, like_plain in zip(ours, exact, plain, strict=True):
        assert_matches_definition(got, want, like_plain, multiple=multiple)


# ---- values ------------------------------------------------------------------------------------
@every_op
@every_dtype
@pytest.mark.parametrize("N", [8, 136, 512])
@pytest.mark.parametrize("K", [1, 65, 866])
def test_shapes(op: str, dtype: torch.dtype, K: int, N: int) -> None:
    for M in (1, 7, 16, 17, 64, 65, 131, 1003):
        for out_features in (8, 264) if op == "gated_mlp" else (72,):
            args = inputs(op, dtype, M, N, K, out_features)
            check(op, run(op, args), args)
            assert record(op)["config"]["launches"] == (2 if op == "gated_mlp" else 1)


@one_dtype
@pytest.mark.parametrize(
    ("op", "problem", "sms", "kernel"),
    [
        # M, N, K: two and more tiles a CTA, on as many SMs.
        ("gated_linear", (135, 1176, 2588), 7, "128x256x64_cooperative_cluster1"),
        ("gated_linear", (13384, 80, 66), 132, "128x128x64_ping_pong_cluster2"),
        ("gated_linear", (4659, 408, 82), 132, "128x128x64_ping_pong_cluster1"),
        ("gated_linear", (8929, 16, 17), 132, "64x128x64_ping_pong_cluster1"),
        ("linear_act", (139, 2336, 926), 7, "128x256x64_cooperative_cluster1"),
        ("linear_act", (9216, 136, 67), 132, "128x128x64_ping_pong_cluster2"),
        ("linear_act", (4636, 776, 9), 132, "128x128x64_ping_pong_cluster1"),
        ("linear_act", (8571, 136, 16), 132, "64x128x64_ping_pong_cluster1"),
    ],
    ids=str,
)
def test_several_tiles_a_cta(
    op: str, dtype: torch.dtype, problem: tuple[int, int, int], sms: int, kernel: str
) -> None:
    args = inputs(op, dtype, *problem)
    with ikbo.sm_limit(sms):
        results = getattr(torch.ops.ikbo, f"{op}_fwd")(*args)
        product = record(f"{op}_fwd")["config"]["product"]
        assert product["kernel"] == f"gemm_sm90_{kernel}" and product["waves"] > 1
        check(op, results[0], args)
        for _ in range(20):
            assert torch.equal(results[0], run(op, args))
            again = getattr(torch.ops.ikbo, f"{op}_fwd")(*args)
            assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))


@every_op
@one_dtype
def test_more_rows_than_65535(op: str, dtype: torch.dtype) -> None:
    args = inputs(op, dtype, 70_001, 72, 40)
    check(op, run(op, args), args)


@every_op
@one_dtype
@pytest.mark.parametrize("M", [9, 60, 133, 3000])
def test_repeats_along_a_long_k(op: str, dtype: torch.dtype, M: int) -> None:
    args = inputs(op, dtype, M, 1544, 2056, 520)
    out = run(op, args)
    check(op, out, args)
    for _ in range(20):
        assert torch.equal(out, call(op, args))


@every_op
@every_dtype
@pytest.mark.parametrize("activation", definitions.ACTIVATIONS)
@pytest.mark.parametrize("problem", [(33, 264, 515), (133, 256, 72), (3000, 520, 130)], ids=str)
def test_activations_and_what_training_saves(
    op: str, dtype: torch.dtype, activation: str, problem: tuple[int, int, int]
) -> None:
    args = inputs(op, dtype, *problem, activation=activation)
    out, *saved = getattr(torch.ops.ikbo, f"{op}_fwd")(*args)
    assert record(f"{op}_fwd")["path"] == "sm90"
    check(op, out, args)
    assert torch.equal(out, run(op, args))
    if op == "linear_act":
        sides = [(args[1], args[2])] if activation in ("relu2", "silu", "gelu", "gelu_tanh") else []
        assert len(saved) == 1 and (sides or saved[0].numel() == 0)
    else:
        sides = [(args[1], args[3]), (args[2], args[4])]
        assert len(saved) == 2
    for got, (w, b) in zip(saved, sides, strict=False):
        check("linear_act", got, [args[0], w, b, "none"])


@every_dtype
@pytest.mark.parametrize("present", range(8))
def test_each_bias_on_its_own(dtype: torch.dtype, present: int) -> None:
    args = inputs("gated_mlp", dtype, 200, 136, 40)
    for bit, place in enumerate((3, 4, 6)):
        if not present >> bit & 1:
            args[place] = None
    check("gated_mlp", run("gated_mlp", args), args)
    gated = [*args[:5], "gelu"]
    check("gated_linear", run("gated_linear", gated), gated)
    linear = [args[0], args[1], args[3], "relu"]
    check("linear_act", run("linear_act", linear), linear)


@every_op
@one_dtype
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_biases_at_any_address(op: str, dtype: torch.dtype, shift: int) -> None:
    args = inputs(op, dtype, 133, 136, 40)
    want = run(op, args)

    def moved(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dim() != 1:
            return t
        return torch.cat([t.new_full((shift,), NAN), t])[shift:]

    def apart(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dim() != 1:
            return t
        return torch.stack([t, t + NAN], dim=1)[:, 0]

    for change in (moved, apart):
        assert torch.equal(run(op, [change(a) for a in args]), want)


@every_op
@one_dtype
@pytest.mark.parametrize("M", [13, 50, 700])
def test_nan_stays_in_its_rows(op: str, dtype: torch.dtype, M: int) -> None:
    args = inputs(op, dtype, M, 264, 100, activation="none")
    clean = run(op, args)
    rows = [M // 9, M // 2 + 1]
    args[0][rows[0], 5], args[0][rows[1], 99] = NAN, NAN
    dirty = run(op, args)
    touched = torch.zeros(M, dtype=torch.bool, device="cuda")
    touched[rows] = True
    assert torch.equal(dirty[~touched], clean[~touched])
    assert bool(dirty[touched].isnan().all())


@every_gated_op
@one_dtype
@pytest.mark.parametrize("M", [40, 300])
@pytest.mark.parametrize("quarter", range(4))
def test_a_wrong_quarter_of_the_columns_cannot_hide(
    op: str, dtype: torch.dtype, quarter: int, M: int
) -> None:
    args = inputs(op, dtype, M, 2048, 64, 48)
    definition = getattr(definitions, op)
    exact, plain = definition(*wide(args)), definition(*args)
    assert_matches_definition(run(op, args), exact, plain)
    columns = slice(quarter * 512, (quarter + 1) * 512)
    for place in (1, 2, 3, 4):
        wrong = list(args)
        wrong[place] = args[place].clone()
        wrong[place][columns] = wrong[place][columns].roll(1, 0)
        with pytest.raises(AssertionError, match="error"):
            assert_matches_definition(run(op, wrong), exact, plain)


# ---- shapes and strides ------------------------------------------------------------------------
@every_gated_op
@one_dtype
@pytest.mark.parametrize("M", [50, 333])
@pytest.mark.parametrize("N", [8, 72, 136, 1544])
def test_stacked_weights_equal_separate_ones(op: str, dtype: torch.dtype, N: int, M: int) -> None:
    """The halves of [gate; up] and of [up; gate], not packed; no half shows in the other's tail."""
    x, w_gate, w_up, b_gate, b_up, *rest = inputs(op, dtype, M, N, 72)
    want = run(op, [x, w_gate, w_up, b_gate, b_up, *rest])
    for first in (0, 1):
        weights, biases = (
            ([w_gate, w_up], [b_gate, b_up]) if first == 0 else ([w_up, w_gate], [b_up, b_gate])
        )
        weight, bias = guarded(torch.cat(weights)), torch.cat(biases)
        halves, of_bias = weight.split(N), bias.split(N)
        args = [x, halves[first], halves[1 - first], of_bias[first], of_bias[1 - first], *rest]
        assert torch.equal(run(op, args), want)
        assert record(op)["config"]["packed_weights"] == 0


@every_op
@one_dtype
@pytest.mark.parametrize("K", [7, 40, 866])
def test_weights_of_any_strides(op: str, dtype: torch.dtype, K: int) -> None:
    args = inputs(op, dtype, 300, 264, K)
    want = run(op, args)
    launches = record(op)["config"]["launches"]
    places = {"gated_linear": (1, 2), "gated_mlp": (1, 2, 5), "linear_act": (1,)}[op]
    for place in places:
        for changed in (guarded(args[place], extra=3), guarded(args[place].T.contiguous()).T):
            out = run(op, [*args[:place], changed, *args[place + 1 :]])
            config = record(op)["config"]
            assert (config["packed_weights"], config["launches"]) == (1, launches + 1)
            assert torch.equal(out, want)
    odd = [guarded(a, extra=1) if i in places else a for i, a in enumerate(args)]
    assert torch.equal(run(op, odd), want)
    assert record(op)["config"]["packed_weights"] == len(places)
    assert record(op)["config"]["launches"] == launches + 1


@every_op
@one_dtype
def test_one_weight_row_for_all_features(op: str, dtype: torch.dtype) -> None:
    args = inputs(op, dtype, 50, 64, 24)
    args[1] = args[1][:1].expand(64, 24)
    check(op, run(op, args), args)


@every_op
@one_dtype
def test_leading_dimensions(op: str, dtype: torch.dtype) -> None:
    x, *rest = inputs(op, dtype, 210, 136, 40)
    want = run(op, [x, *rest])
    for sizes in ((210,), (2, 105), (2, 3, 35)):
        assert torch.equal(
            run(op, [x.reshape(*sizes, 40), *rest]), want.reshape(*sizes, want.shape[-1])
        )
    assert torch.equal(run(op, [x[5].contiguous(), *rest]), run(op, [x[5:6], *rest])[0])
    assert call(op, [x[:0], *rest]).shape == (0, want.shape[-1])


@every_op
@one_dtype
def test_one_row_has_no_stride(op: str, dtype: torch.dtype) -> None:
    x, *rest = inputs(op, dtype, 1, 64, 37)
    want = run(op, [x, *rest])
    assert torch.equal(run(op, [x.as_strided((1, 37), (3, 1)), *rest]), want)


@every_dtype
@pytest.mark.parametrize("N", range(1, 9))
def test_few_features(dtype: torch.dtype, N: int) -> None:
    """Rows that begin anywhere; K with and without a rest, shorter and longer than a warp reads."""
    for M in (1, 65, 701):
        for K in (7, 256, 1031):
            args = inputs("linear_act", dtype, M, N, K, activation="silu")
            out, preact = torch.ops.ikbo.linear_act_fwd(*args)
            check("linear_act", out, args)
            check("linear_act", preact, with_activation(args, "none"))
            assert torch.equal(run("linear_act", args), out)
    args = inputs("gated_mlp", dtype, 300, 264, 72, N)
    want = run("gated_mlp", args)
    check("gated_mlp", want, args)
    # Eight features may be streamed, and then need what TMA can store.
    first, columns = (2, N + 5) if N < 8 else (8, 24)
    buffer = torch.full((302, columns), NAN, dtype=dtype, device="cuda")
    inside = buffer[1:301, first : first + N]
    torch.ops.ikbo.gated_mlp.out(*args, out=inside)
    assert record("gated_mlp")["path"] == "sm90" and torch.equal(inside, want)
    inside.fill_(NAN)
    assert bool(buffer.isnan().all())
    with ikbo.strict():
        check_gradients("gated_mlp", inputs("gated_mlp", dtype, 300, 264, 72, N))
        check_gradients("linear_act", inputs("linear_act", dtype, 300, N, 72, activation="gelu"))


@every_op
@every_dtype
def test_what_the_kernels_decline(op: str, dtype: torch.dtype) -> None:
    args = inputs(op, dtype, 50, 64, 40)
    x = args[0]
    declined = [
        ([guarded(x, extra=1), *args[1:]], "features whose"),
        ([guarded(x.T.contiguous()).T, *args[1:]], "features whose"),
        ([x[:1].expand(50, 40), *args[1:]], "features whose"),
        (inputs(op, dtype, 50, 60, 40), "multiple of 8"),
        (inputs(op, dtype, 50, 64, 0), "without features"),
    ]
    if op == "gated_mlp":
        declined.append((inputs(op, dtype, 50, 64, 40, 36), "multiple of 8"))
        declined.append((inputs(op, dtype, 50, 0, 40), "no hidden features"))
    for changed, word in declined:
        check(op, call(op, changed), changed)
        assert record(op)["path"] == "reference" and word in record(op)["reason"]


@every_dtype
def test_without_features_only_the_biases_count(dtype: torch.dtype) -> None:
    args = inputs("gated_linear", dtype, 9, 64, 0, activation="relu")
    want = (torch.relu(args[3].float()) * args[4].float()).to(dtype).expand(9, 64)
    assert torch.equal(call("gated_linear", args), want)
    args = inputs("linear_act", dtype, 9, 64, 0, activation="relu")
    assert torch.equal(call("linear_act", args), torch.relu(args[2]).expand(9, 64))


@every_gated_op
@every_dtype
@pytest.mark.parametrize(("extra", "path"), [(0, "sm90"), (1, "reference")])
def test_out(op: str, dtype: torch.dtype, extra: int, path: str) -> None:
    args = inputs(op, dtype, 331, 264, 40, 136)
    want = run(op, args)
    out = guarded(torch.zeros_like(want), extra)
    buffer = out._base
    assert buffer is not None
    getattr(torch.ops.ikbo, op).out(*args, out=out)
    assert record(op)["path"] == path
    if path == "sm90":
        assert torch.equal(out, want)
    else:
        check(op, out, args)
    out.fill_(NAN)
    assert bool(buffer.isnan().all())  # nothing else was written


# ---- order on the stream -----------------------------------------------------------------------
def chain(op: str, layers: list[list[Any]], x: Tensor, *, wait: bool) -> Tensor:
    """Each layer's result is the next one's input; memory is used again as soon as it may be."""
    for layer in layers:
        x = call(op, [x, *layer])
        if wait:
            torch.cuda.synchronize()
    return x


@every_op
@one_dtype
@pytest.mark.parametrize(("M", "N"), [(1, 256), (40, 2056), (200, 256), (2000, 256), (3000, 1032)])
def test_calls_one_after_another(op: str, dtype: torch.dtype, M: int, N: int) -> None:
    """gated_mlp's second kernel starts before the first has ended: it may neither read what is not
    there yet nor overwrite what is still read."""
    layers = []
    for seed in range(8):
        K = N if op != "gated_mlp" else 264
        args = inputs(op, dtype, M, N, K, 264, activation="sigmoid", seed=seed)
        x, layer = args[0], args[1:]
        layers.append(layer)
    want = chain(op, layers, x, wait=True)
    assert bool(want.isfinite().all())
    for _ in range(20):
        assert torch.equal(chain(op, layers, x, wait=False), want)


@every_op
@pytest.mark.parametrize("M", [30, 1500])
def test_two_streams_at_once(op: str, M: int) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    args = [inputs(op, torch.bfloat16, M, 512, 300, 520, seed=seed) for seed in range(2)]
    want = [run(op, a) for a in args]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(call(op, args[i]))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(out, want[i]) for out in results[i])


@every_op
@one_dtype
@pytest.mark.parametrize("M", [50, 500])
def test_graph_replay_with_other_inputs(op: str, dtype: torch.dtype, M: int) -> None:
    first, second = (inputs(op, dtype, M, 264, 130, 520, seed=seed) for seed in range(2))
    static = [guarded(a) if isinstance(a, Tensor) else a for a in first]
    static[1] = guarded(first[1], extra=1)  # packed in the graph
    ikbo.warmup()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = getattr(torch.ops.ikbo, f"{op}_fwd")(*static)
        again = call(op, static)
    for args in (first, second, first):
        for to, value in zip(static, args, strict=True):
            if isinstance(to, Tensor):
                to.copy_(value)
        graph.replay()
        wants = getattr(torch.ops.ikbo, f"{op}_fwd")(*args)
        assert all(torch.equal(got, want) for got, want in zip(results, wants, strict=True))
        assert torch.equal(again, wants[0])


@every_op
def test_fewer_sms_give_the_same_bits(op: str) -> None:
    args = inputs(op, torch.bfloat16, 3000, 520, 136, 264)
    want = run(op, args)
    for sms in (1, 7, 100):
        with ikbo.sm_limit(sms):
            out = run(op, args)
        config = record(op)["config"]
        products = [config[name] for name in ("product", "hidden", "down") if name in config]
        assert products and all(product["grid"] <= sms for product in products)
        assert torch.equal(out, want)


# ---- what is said of it, what it takes ---------------------------------------------------------
@every_op
@pytest.mark.parametrize("M", [30, 2000])
def test_explain_shows_what_the_config_says(op: str, M: int) -> None:
    _host = pytest.importorskip("ikbo._host")
    args = inputs(op, torch.bfloat16, M, 512, 1024, 264)
    shown = ikbo.explain(op, *args)
    properties = torch.cuda.get_device_properties(0)
    device = _host.DeviceLimits(
        properties.multi_processor_count, properties.L2_cache_size, 227 * 1024
    )
    problem = (M, 512, 1024, 264)[: 4 if op == "gated_mlp" else 3]
    config = json.loads(repr(getattr(_host, f"{op}_config")(*problem, device)))
    assert shown == {"op": op, "path": "sm90", "reason": "", "config": config}


def test_inference_takes_one_hidden_tensor() -> None:
    M, N, K, out_features = 4096, 2048, 256, 128
    args = inputs("gated_mlp", torch.bfloat16, M, N, K, out_features)
    run("gated_mlp", args)
    assert peak_bytes(lambda: run("gated_mlp", args)) <= 2 * M * (N + out_features) + 2**10
