"""Choices of the weight stream, us per call of gated_mlp in a graph of two calls over two sets of weights, behind a flush
that leaves clean lines (and dirty ones, for the first). Also each product alone."""
import os, statistics
import torch, ikbo
torch.set_grad_enabled(False)
K, N, dev = 4096, 11008, "cuda"
r = lambda *s: (torch.randn(*s, device=dev) * s[-1] ** -.5).bfloat16()
sets = [(r(N, K), r(N, K), r(K, N)) for _ in range(2)]
src = torch.empty(N * K * 3 // 2, dtype=torch.bfloat16, device=dev); dst = torch.empty_like(src); src2 = src.clone()
flush = torch.empty(256 << 20, dtype=torch.uint8, device=dev)
clean = torch.zeros(32 << 20, dtype=torch.int32, device=dev)
def dirty_flush(): flush.zero_()
def clean_flush(): flush.zero_(); clean.amax()
def graph_of(calls):
    for c in calls: c()
    torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): keep = [c() for c in calls]
    return g, keep
def once(g, how):
    how(); s, e = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    s.record(); g.replay(); e.record(); e.synchronize(); return s.elapsed_time(e) * 500
G, D = "WS2_", "WS1_"
def down(F, S): return {D + "F": F, D + "S": S}
choices = {"base": {}}
for F, S in ((72, 4), (64, 2), (32, 2), (80, 4)): choices[f"{F}x{S}"] = down(F, S)
choices["gate pairs"] = {G + "PAIR": 1}; choices["both pairs"] = {G + "PAIR": 1, D + "PAIR": 1}
choices["gate 64"] = {G + "F": 64}
def env(c):
    for k in list(os.environ):
        if k[:4] in (G, D): del os.environ[k]
    os.environ.update({k: str(v) for k, v in c.items()})
print("copy", [round(statistics.median(once(graph_of([lambda: dst.copy_(src), lambda: dst.copy_(src2)])[0], how) for _ in range(9)), 2) for how in (dirty_flush, clean_flush)])
for M in (64, 16, 1):
    x, h = r(M, K), r(M, N)
    op = torch.ops.ikbo.gated_mlp
    mlp = [lambda s=s: op(x, s[0], s[1], None, None, s[2], None, "silu") for s in sets]
    gl = [lambda s=s: torch.ops.ikbo.gated_linear(x, s[0], s[1], None, None, "silu") for s in sets]
    dn = [lambda s=s: torch.ops.ikbo.linear_act(h, s[2], None, "none") for s in sets]
    graphs, want = {}, None
    for name, c in choices.items():
        env(c); got = mlp[0](); torch.cuda.synchronize()
        if want is None: want = got
        err = ((got - want).float().norm() / want.float().norm()).item()
        graphs[name] = (graph_of(mlp), graph_of(gl) if "next" not in name else None, graph_of(dn) if "next" not in name else None, err)
    times = {n: ([], [], []) for n in graphs}
    for _ in range(11):
        for n, g in graphs.items():
            for i in range(3):
                if g[i]: times[n][i].append(once(g[i][0], clean_flush))
    env({})
    print(M, "tokens; base behind dirty lines", round(statistics.median(once(graphs["base"][0][0], dirty_flush) for _ in range(11)), 2))
    for n, t in times.items(): print(f"  {n:22}", *(f"{statistics.median(v):7.2f}" if v else "      -" for v in t), f"  err {graphs[n][3]:.1e}", flush=True)
    del graphs
