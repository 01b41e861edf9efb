"""Variants of LayerNorm with an e4m3 result, 4096 columns: bits against the present kernel's, times beside the copy."""
import ctypes, statistics, subprocess, sys, time
from pathlib import Path
import torch

here = Path(__file__).resolve().parent
lab = ctypes.CDLL(str(here / "lab.so"))
tests = ctypes.CDLL(str(here / "libikbo_device_tests.so"))
N, EPS = 4096, 1e-6
names = subprocess.run(f"grep -ao 'lab_[a-z0-9]*' {here}/lab.so | sort -u", shell=True, capture_output=True, text=True).stdout.split()
VARIANTS = ["base"] + sorted({n[4:] for n in names if hasattr(lab, n)} - {"base"})
fns = {}
for n in VARIANTS:
    fns[n] = getattr(lab, "lab_" + n)
    fns[n].argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_long, ctypes.c_float, ctypes.c_void_p]
lab.check_scales.argtypes = [ctypes.c_void_p] * 2
tests.ikbo_test_copy.restype = ctypes.c_char_p
tests.ikbo_test_copy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
stream = lambda: torch.cuda.current_stream().cuda_stream

def call(n, x, w, b, out):
    y, mean, rstd, scales = out
    rc = fns[n](x.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), mean.data_ptr(), rstd.data_ptr(), scales.data_ptr(), x.shape[0], EPS, stream())
    assert rc == 0, (n, rc)

def outputs(M):
    y = torch.zeros(M + 2, N, dtype=torch.uint8, device="cuda")
    return y, *(torch.zeros(M + 2, device="cuda") for _ in range(3))

start = time.time()
wrong = torch.zeros(4, dtype=torch.int64, device="cuda")
assert lab.check_scales(wrong.data_ptr(), stream()) == 0
print("scales, factors that differ, last:", wrong.tolist(), flush=True)

# bits
bad = {n: 0 for n in VARIANTS}
g = torch.Generator("cuda").manual_seed(0)
def randn(*s): return torch.randn(*s, dtype=torch.bfloat16, device="cuda", generator=g)
for M in (1, 2, 7, 1001, 32768):
    for kind in range(4):
        x, w, b = randn(M, N), randn(N), randn(N)
        if kind == 1: x += 3 * randn(M, 1) * 30
        if kind == 2:
            x[::3] = 0; x[M // 2, 77] = float("nan"); x[M // 3, 4000] = float("inf")
            if M > 20: x[11] = -0.0; x[13] *= 1e30; x[15] *= 1e-30; x[17] = 1e-40; b[:] = -0.0
        if kind == 3:
            w[5] = 3e38; b[9] = 3e38; b[77] = float("inf")
            if M == 7: w[3] = float("nan")
        want = outputs(M); call("base", x, w, b, want)
        for n in VARIANTS[1:]:
            got = outputs(M); call(n, x, w, b, got)
            same = all(torch.equal(a.view(torch.uint8), c.view(torch.uint8)) for a, c in zip(got, want))
            if not same:
                bad[n] += 1
                print("DIFFERS", n, M, kind, [int((a.view(torch.uint8) != c.view(torch.uint8)).sum()) for a, c in zip(got, want)], flush=True)
print("bits that differ:", bad, f"{time.time() - start:.1f} s", flush=True)

# times: as benchmarks/timing.py
M, SETS = 32768, 2
flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
def timed(launch):
    s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_(); flush.amax()
    s.record(); launch(); e.record(); e.synchronize()
    return s.elapsed_time(e) * 1e3
def graph_of(calls):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in calls: c()
    timed(graph.replay)
    return lambda: statistics.median(timed(graph.replay) for _ in range(3)) / len(calls)
data = [(randn(M, N), randn(N), randn(N), (torch.empty(M, N, dtype=torch.uint8, device="cuda"), *(torch.empty(M, device="cuda") for _ in range(3)))) for _ in range(SETS)]
samplers = {n: graph_of([lambda d=d, n=n: call(n, *d) for d in data]) for n in VARIANTS}
part = M * N * 3 // 2
pairs = [[torch.empty(part, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(SETS)]
for f in range(5):
    samplers[f"copy{f}"] = graph_of([lambda a=a, f=f: tests.ikbo_test_copy(a[0].data_ptr(), None, a[1].data_ptr(), part, f, stream()) for a in pairs])
samples = {n: [] for n in samplers}
order = list(samplers)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 21):
    for n in order: samples[n].append(samplers[n]())
    order = order[1:] + order[:1]
us = {n: statistics.median(s) for n, s in samples.items()}
best = min((n for n in us if n.startswith("copy")), key=us.get)
for n in samplers:
    ratio = statistics.median(a / c for a, c in zip(samples[best], samples[n]))
    print(f"{n:10s} {us[n]:8.2f} us  copy/it {ratio:.3f}  min {min(samples[n]):.2f} max {max(samples[n]):.2f}")
print(f"best copy {best}; {time.time() - start:.1f} s", flush=True)
