"""Splits and options of the weight stream: us of gated_mlp, each product's share by gated_linear alone."""
import os, statistics, itertools, sys
import torch, ikbo
torch.set_grad_enabled(False)
K, N = 4096, 11008
dev = "cuda"
r = lambda *s: (torch.randn(*s, device=dev) * s[-1] ** -.5).bfloat16()
wg, wu, wd = r(N, K), r(N, K), r(K, N)
src = torch.empty(N * K * 3 // 2, dtype=torch.bfloat16, device=dev); dst = torch.empty_like(src)
def timed(fn, n=4, reps=5):
    fn(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): fn()
    t = []
    for _ in range(reps):
        s, e = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        s.record(); g.replay(); e.record(); e.synchronize(); t.append(s.elapsed_time(e) * 1e3 / n)
    return statistics.median(t)
def env(**k):
    for n in ("WS1", "WS2", "WSP", "WSA", "WSH", "WSR"): os.environ.pop(n, None)
    for n, v in k.items():
        if v is not None: os.environ[n] = str(v)
print("copy of the weights' bytes", round(timed(lambda: dst.copy_(src)), 2))
for M in (16, 64, 1):
    x, h = r(M, K), r(M, N)
    gl = lambda: torch.ops.ikbo.gated_linear(x, wg, wu, None, None, "silu")
    down = lambda: torch.ops.ikbo.linear_act(h, wd, None, "none")
    mlp = lambda: torch.ops.ikbo.gated_mlp(x, wg, wu, None, None, wd, None, "silu")
    env()
    print(M, "default", round(timed(mlp), 2), {k: v for k, v in ikbo.explain("gated_mlp", x, wg, wu, None, None, wd, None, "silu").items()})
    for s in (1, 2, 4, 8):
        env(WS2=s); a = timed(gl); env(WS1=s); b = timed(down)
        print(M, "split", s, "gate+up", round(a, 2), f"{2*N*K*2/a/1e6:.2f} TB/s", "down", round(b, 2), f"{N*K*2/b/1e6:.2f} TB/s", flush=True)
    row = {}
    for s2, s1 in itertools.product((1, 2, 4), (2, 4, 8)):
        env(WS2=s2, WS1=s1); row[s2, s1] = round(timed(mlp), 2)
    print(M, row, flush=True)
    best = min(row, key=row.get)
    for extra in (dict(WSP=1), dict(WSA=2), dict(WSA=3), dict(WSA=4), dict(WSH=1), dict(WSR=1), dict(WSR=5), dict(WSR=17), dict(WSR=2, WSH=1)):
        env(WS2=best[0], WS1=best[1], **extra); print(M, best, extra, round(timed(mlp), 2), flush=True)
