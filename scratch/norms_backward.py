"""The norms' backward, candidates chosen by environment, side by side in one process.

  PYTHONPATH=... python scratch/norms_backward.py [--seconds 60] [filter ...]

A candidate: NAME of csrc/kernels/norm/instantiations/backward_variants.cu or "base", then "+f" for
the other finish, "+a" for sums over rows apart, "+lN" for a lead of N. First a check: grad_x has the
present kernel's bits, gradients of weight and bias are near fp64's and repeat. Then a line a case:
share of the copy of each candidate (the recorded one of base, times base's time over its); few
rows: microseconds, torch.compile's too."""

import argparse
import math
import os
import statistics
import time

import torch

import ikbo  # noqa: F401

start = time.time()
parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=60.0)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--compile", action="store_true")
parser.add_argument("filters", nargs="*")
options = parser.parse_args()

EPS = 1e-6
ops = torch.ops.ikbo
bf16 = torch.bfloat16
fp32 = torch.float32
M4 = ["new", "m0", "m1", "m2", "m3"]
CASES = [
    (131072, 128, bf16, ["new"]), (32768, 256, bf16, ["new"]), (32768, 384, bf16, ["new"]),
    (32768, 512, bf16, ["new"]), (32768, 768, bf16, ["new"]), (32768, 1024, bf16, M4),
    (32768, 2048, bf16, M4), (32768, 4096, bf16, M4), (32768, 8192, bf16, ["new"]),
    (1024, 12288, bf16, M4), (32768, 16384, bf16, ["new"]), (32768, 32768, bf16, ["new"]),
    (16384, 65536, bf16, ["new"]), (8192, 131072, bf16, ["new"]), (4096, 262144, bf16, [*M4, "m4", "m5", "m6", "m7"]),
    (16384, 4096, fp32, ["new"]), (4096, 131072, fp32, [*M4, "m4", "m5", "m6", "m7"]),
    (8, 8192, bf16, ["new"]), (128, 4096, bf16, ["new"]), (128, 1024, bf16, ["new"]),
    (200, 128, bf16, ["new"]), (100, 8192, bf16, ["new"]),
]
# Share of the copy's speed of base as recorded, and the bar: RMSNorm, LayerNorm.
RATIOS = {
    (131072, 128): (0.785, 0.676), (32768, 256): (0.714, 0.649), (32768, 384): (0.735, 0.694),
    (32768, 512): (0.75, 0.71), (32768, 768): (0.785, 0.740), (32768, 1024): (0.813, 0.794),
    (32768, 2048): (0.891, 0.854), (32768, 4096): (0.936, 0.904), (32768, 8192): (0.926, 0.920),
    (1024, 12288): (0.650, 0.573), (32768, 16384): (0.950, 0.941), (32768, 32768): (0.956, 0.873),
    (16384, 65536): (0.952, 0.868), (8192, 131072): (0.917, 0.843), (4096, 262144): (0.859, 0.779),
    (16384, 4096): (0.905, 0.888), (4096, 131072): (0.871, 0.858),
}  # fmt: skip
MUST = {
    (131072, 128): (0.80, 0.80), (32768, 256): (0.73, 0.73), (32768, 384): (0.77, 0.77),
    (32768, 512): (0.77, 0.77), (32768, 768): (0.85, 0.80), (32768, 1024): (0.85, 0.80),
    (32768, 2048): (0.88, 0.88), (32768, 4096): (0.92, 0.90), (32768, 8192): (0.92, 0.90),
    (1024, 12288): (0.66, 0.59), (32768, 16384): (0.92, 0.90), (32768, 32768): (0.91, 0.91),
    (16384, 65536): (0.91, 0.91), (8192, 131072): (0.91, 0.91), (4096, 262144): (0.91, 0.91),
    (16384, 4096): (0.88, 0.88), (4096, 131072): (0.88, 0.88),
}  # fmt: skip


def choose(text):
    for key in ("RING", "MODE"):
        os.environ.pop("IKBO_NORM_" + key, None)
    if text == "base":
        os.environ["IKBO_NORM_RING"] = "1"
    elif text[0] == "m":
        os.environ["IKBO_NORM_MODE"] = text[1:]


def backward(layer, g, x, w, b, stats):
    if layer:
        return ops.layer_norm_bwd(g, x, w, b, *stats, 0.0, 1, 0b111)
    return ops.rms_norm_bwd(g, x, w, None, *stats, 0.0, 1, 0b11)[:2]


def forward(layer, x, w, b):
    out = ops.layer_norm_fwd(x, w, b, EPS) if layer else ops.rms_norm_fwd(x, w, None, EPS)
    return out[1:]


def check():
    wrong = done = 0
    gen = torch.Generator("cuda").manual_seed(1)
    for _, N, dtype, cands in CASES:
        for rows in (1, 37, 300, 1003 if N > 30000 else 3001):
            x, g = (torch.randn(rows, N, device="cuda", generator=gen).to(dtype) for _ in range(2))
            w, b = (torch.randn(N, device="cuda", generator=gen).to(dtype) for _ in range(2))
            for layer in (False, True):
                stats = forward(layer, x, w, b)
                choose("base")
                want = backward(layer, g, x, w, b, stats)
                xd, gd = x.double(), g.double()
                xhat = (xd - (stats[0].double().view(-1, 1) if layer else 0)) * stats[-1].double().view(-1, 1)
                exact = [(gd * xhat).sum(0), gd.sum(0)]
                del xd, gd, xhat
                for c in cands:
                    choose(c)
                    one = backward(layer, g, x, w, b, stats)
                    two = backward(layer, g, x, w, b, stats)
                    done += 1
                    bad = []
                    if not torch.equal(one[0], want[0]):
                        bad.append(f"dx differs {(one[0] != want[0]).sum().item()}")
                    if not all(torch.equal(p, q) for p, q in zip(one, two)):
                        bad.append("not the same twice")
                    for i, e in enumerate(exact[: 2 if layer else 1]):
                        err = ((one[1 + i].double() - e).norm() / e.norm()).item()
                        if not err < (3e-3 if dtype is bf16 else 3e-6):
                            bad.append(f"sums {i}: {err:.1e}")
                    if bad:
                        wrong += 1
                        print(f"WRONG {rows}x{N} {c} {'ln' if layer else 'rms'}: {'; '.join(bad)}", flush=True)
                choose("base")
    torch.cuda.synchronize()
    print(f"check: {done} calls, {wrong} wrong, {time.time() - start:.0f} s", flush=True)
    return wrong


def graph_of(calls, pool):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        kept = [call() for call in calls]
    del kept
    return graph


events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]


def sample(graph, calls, us):
    reps = max(1, min(8, math.ceil(700 / (us * calls))))
    graph.replay()
    events[0].record()
    for _ in range(reps):
        graph.replay()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) * 1e3 / (reps * calls)


def compiled(layer):
    def rms(g, x, w, rstd):
        n = x.float() * rstd
        gw = g.float() * w.float()
        dx = rstd * (gw - n * (gw * n).mean(-1, keepdim=True))
        return dx.to(x.dtype), (g.float() * n).sum(0).to(w.dtype)

    def ln(g, x, w, mean, rstd):
        n, gf = (x.float() - mean) * rstd, g.float()
        gw = gf * w.float()
        inner = gw.mean(-1, keepdim=True) + n * (gw * n).mean(-1, keepdim=True)
        return (rstd * (gw - inner)).to(x.dtype), (gf * n).sum(0).to(w.dtype), gf.sum(0).to(w.dtype)

    torch._dynamo.reset()
    return torch.compile(ln if layer else rms, dynamic=False)


def measure(M, N, dtype, cands):
    total = 3 * M * N * dtype.itemsize
    sets = max(1, min(200, math.ceil(400e6 / total)))
    calls = max(sets, 2)
    small = M * N <= 1 << 20
    xs, gs = ([torch.randn(M, N, dtype=dtype, device="cuda") for _ in range(sets)] for _ in range(2))
    ws, bs = ([torch.randn(N, dtype=dtype, device="cuda") for _ in range(sets)] for _ in range(2))
    for layer in (False, True):
        name = f"{'ln' if layer else 'rms'}_bwd_{M}x{N}"
        if time.time() - start > options.seconds:
            print("out of time before", name, flush=True)
            return
        stats = [forward(layer, xs[i], ws[i], bs[i]) for i in range(sets)]
        pool = torch.cuda.graph_pool_handle()
        made = {}
        for c in ("base", *cands):
            choose(c)
            call = lambda i: backward(layer, gs[i], xs[i], ws[i], bs[i], stats[i])
            call(0)
            made[c] = graph_of([lambda i=i: call(i % sets) for i in range(calls)], pool)
        choose("base")
        if small and options.compile:
            fn = compiled(layer)
            st = [[t.view(-1, 1) for t in s] for s in stats]
            fn(gs[0], xs[0], ws[0], *st[0])
            made["compile"] = graph_of(
                [lambda i=i: fn(gs[i % sets], xs[i % sets], ws[i % sets], *st[i % sets]) for i in range(calls)], pool
            )
        times = {c: [] for c in made}
        for _ in range(options.rounds):
            for c, graph in made.items():
                times[c].append(sample(graph, calls, total / 4e6 + 3))
        us = {c: statistics.median(t) for c, t in times.items()}
        if small:
            cells = "  ".join(f"{c} {t:.2f}us" for c, t in us.items())
            bar = ""
        else:
            recorded, must = RATIOS[M, N][layer], MUST[M, N][layer]
            ratio = {c: recorded * us["base"] / t for c, t in us.items()}
            cells = "  ".join(f"{c} {r:.3f}{'*' if r >= must else ''}" for c, r in ratio.items())
            bar = f"must {must} base {us['base']:.1f}us "
        print(f"{name:20s} {bar} {cells}", flush=True)


print(torch.cuda.get_device_name(), torch.__version__, flush=True)
if options.filters:
    CASES = [c for c in CASES if any(f in f"{c[0]}x{c[1]}_" for f in options.filters)]
failed = check()
for case in CASES:
    measure(*case)
    torch.cuda.empty_cache()
print(f"{time.time() - start:.0f} s, check {'FAILED' if failed else 'passed'}", flush=True)
