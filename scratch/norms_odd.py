"""Odd rows of the norms' forward: kernels by rings ("old") and without, by bytes of a unit (IKBO_ODD).

First a check of values and canaries over lengths, shifts of x, residual and y. Then a line a case:
  case  copy_us  old_us  copy/old  candidate copy/candidate ...
"""

import math
import os
import statistics
import sys
import time
from types import SimpleNamespace

import torch

import ikbo  # noqa: F401
from benchmarks.device_tests import copies

start = time.time()
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
KEY, EPS, ROUNDS = "IKBO_ODD", 1e-6, 5
ops = torch.ops.ikbo
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def choose(candidate):
    if candidate:
        os.environ[KEY] = candidate
    else:
        os.environ.pop(KEY, None)


def flat(values, shift, gap=0):
    """A copy `shift` elements past an aligned address, rows `gap` apart, NaN around."""
    M, N = values.shape
    store = torch.full((64 + shift + M * (N + gap) + 64,), float("nan"), dtype=values.dtype, device="cuda")
    view = store[64 + shift : 64 + shift + M * (N + gap)].view(M, N + gap)[:, :N]
    view.copy_(values)
    return view, store


def exact(layer, x, w, b):
    x = x.double()
    if layer:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    y = y * w.double() if w is not None else y
    return y + b.double() if b is not None else y


def addresses():
    """Every layout and option once, few rows: for the sanitizer, with memory at its exact size."""
    calls = 0
    for dtype in (bf16, fp32, fp16):
        for N in [1, 5, 33, 127, 130, 257, 385, 769, 1001, 1025, 2049, 2700, 4095, 9001, 20001, 40001]:
            if dtype is fp16 and N not in (130, 769, 4095):
                continue
            rows, n = 37 if N < 1000 else 3, 16 // dtype.itemsize

            def last(size):
                """Of memory that ends with them, and at 16 bytes."""
                return torch.ones(-(-(size + 3) // n) * n, dtype=dtype, device="cuda")[-size:]

            apart = last(rows * (N + 3)).view(rows, N + 3)[:, 3:]
            x, exactly, out = (last(rows * N).view(rows, N) for _ in range(3))
            w = last(N).clone()
            for op in ("rms_norm", "layer_norm"):
                for source in (x, apart, exactly):
                    getattr(ops, op).out(source, w, w, EPS, out=out)
                    getattr(ops, f"add_{op}")(source, exactly, w, None, EPS)
                getattr(ops, op).out(exactly, w, w.float(), EPS, 1.0, out=out)
                getattr(ops, f"{op}_quant")(exactly, w)
                calls += 8
    torch.cuda.synchronize()
    print(f"check: {calls} calls", flush=True)


def check():
    errors = calls = 0
    sizes = [*range(1, 41), 127, 129, 130, 255, 257, 258, 383, 385, 769, 1001, 1023, 1025, 2049, 4095, 4097, 8191, 9001]
    for dtype in (bf16, fp32):
        tolerance = 4e-3 if dtype is bf16 else 1e-6
        for N in sizes:
            for case, (rows, shift, gap) in enumerate([(1, 1, 0), (37, 0, 0), (301, 3, 0), (77, 5, 3), (40000 if N < 1000 else 4500, 7, 0)]):
                full = torch.randn(rows, N, dtype=dtype, device="cuda") + 1
                x, _ = flat(full, shift, gap)
                w = torch.randn(N, dtype=dtype, device="cuda")
                b = torch.randn(N, dtype=dtype, device="cuda")
                for layer in (False, True):
                    out, store = flat(full, (shift * 3 + case) % 8, gap if case % 2 else 0)
                    store.fill_(float("nan"))
                    bias = b if layer else None
                    (ops.layer_norm if layer else ops.rms_norm).out(x, w, bias, EPS, out=out)
                    fwd = (ops.layer_norm_fwd if layer else ops.rms_norm_fwd)(x, w, bias, EPS)[0]
                    want = exact(layer, x, w, bias)
                    error = ((out.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
                    kept = store.clone()
                    kept[64 + (shift * 3 + case) % 8 :][: rows * (N + (gap if case % 2 else 0))].view(rows, -1)[:, :N] = float("nan")
                    # A LayerNorm of a column is its bias; of two, nothing but rounding.
                    bad = (not error < tolerance and not (layer and N < 3)) or not kept.isnan().all() or not torch.equal(fwd, out)
                    calls += 1
                    if bad:
                        errors += 1
                        if errors < 12:
                            print("WRONG", dtype, N, rows, shift, gap, layer, f"{error:.1e}", kept.isnan().all().item(), torch.equal(fwd, out), flush=True)
                if case < 4:
                    r, _ = flat(torch.randn_like(full), (shift + 2) % 8, 0)
                    y, total = ops.add_rms_norm(x, r, w, None, EPS)
                    want = exact(False, x.double() + r.double(), w, None)
                    error = ((y.double() - want).norm() / want.norm()).item()
                    calls += 1
                    if not error < tolerance or not torch.equal(total, (x.float() + r.float()).to(dtype)):
                        errors += 1
                        if errors < 12:
                            print("WRONG add", dtype, N, rows, shift, f"{error:.1e}", flush=True)
    print(f"check: {calls} calls, {errors} wrong, {time.time() - start:.0f} s", flush=True)


events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]


def sample(graph, calls, us):
    reps = max(1, min(8, math.ceil(500 / (us * calls))))
    graph.replay()
    events[0].record()
    for _ in range(reps):
        graph.replay()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) * 1e3 / (reps * calls)


def graph_of(calls, pool):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        kept = [call() for call in calls]
    del kept
    return graph


def measure(M, N, dtype, candidates, kinds=("rms", "ln"), shift=0, gap=0):
    size = dtype.itemsize
    total = 2 * M * N * size
    sets = max(2, min(300, math.ceil(400e6 / total)))
    xs = []
    for _ in range(sets):
        x = torch.randn(M * (N + gap) + shift, dtype=dtype, device="cuda")
        xs.append(x[shift:].view(M, N + gap)[:, :N])
    ws, bs = torch.randn(N, dtype=dtype, device="cuda"), torch.randn(N, dtype=dtype, device="cuda")
    copy_us = {}
    for kind in kinds:
        if time.time() - start > SECONDS:
            print("out of time before", kind, M, N, flush=True)
            return
        moved = total * (2 if kind == "add" else 1)
        pool, graphs = torch.cuda.graph_pool_handle(), {}

        def ours(i, kind=kind):
            if kind == "ln":
                return ops.layer_norm(xs[i], ws, bs, EPS)
            if kind == "add":
                return ops.add_rms_norm(xs[i], xs[(i + 1) % sets], ws, None, EPS)
            return ops.rms_norm(xs[i], ws, None, EPS)

        for candidate in candidates:
            choose(candidate)
            ours(0)
            graphs[candidate] = graph_of([lambda i=i: ours(i) for i in range(sets)], pool)
        choose("")
        if moved not in copy_us:
            made = [m(SimpleNamespace(x=xs[0])) for m in copies(moved, 1)]
            for form, call in enumerate(made):
                call()
                graphs[form] = graph_of([call] * 2, pool)
        times = {c: [] for c in graphs}
        for _ in range(ROUNDS):
            for c, graph in graphs.items():
                times[c].append(sample(graph, 2 if isinstance(c, int) else sets, moved / 4e6 + 2))
        us = {c: statistics.median(t) for c, t in times.items()}
        if moved not in copy_us:
            copy_us[moved] = min(u for c, u in us.items() if isinstance(c, int))
        cells = [f"{c or 'now'} {copy_us[moved] / us[c]:.3f}" for c in candidates]
        mark = (f"+{shift}" if shift else "") + (f" gap {gap}" if gap else "")
        print(f"{kind:3s} {M}x{N}{mark} {str(dtype)[6:]:8s} copy {copy_us[moved]:7.2f} us  {'  '.join(cells)}", flush=True)


if sys.argv[2:] == ["check"]:
    addresses()
    sys.exit()
OLD = sys.argv[2:] == ["old"]
if not OLD:
    check()
WARP = ["", "1024", "2048", "8192", "16384"]
CTA = ["", "8192", "32768", "65536"]


def case(M, N, dtype, candidates, *args, **kwargs):
    measure(M, N, dtype, [""] if OLD else candidates, *args, **kwargs)


case(522240, 257, bf16, [""])
case(174592, 769, bf16, [""])
case(32768, 4095, bf16, [""])
case(524288, 127, bf16, [""])
case(2000000, 33, bf16, [""])
case(131072, 1001, bf16, [""])
case(65536, 1025, bf16, [""])
case(65536, 2049, bf16, [""])
case(20000, 8191, bf16, [""])
case(16384, 9001, bf16, [""])
case(8192, 20001, bf16, [""])
case(4096, 100001, bf16, [""])
case(16384, 4095, fp32, [""])
case(262144, 257, fp32, [""])
case(174592, 769, fp16, [""], ("ln",))
case(16384, 4095, bf16, [""], ("add",))
case(87296, 769, bf16, [""], ("add",))
case(32768, 4095, bf16, [""], ("ln",), gap=3)
case(1000, 257, bf16, [""], ("ln",))
case(600, 4095, bf16, [""], ("ln",))
print(f"{time.time() - start:.0f} s", flush=True)
