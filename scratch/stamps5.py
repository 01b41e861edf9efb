"""Where the clocks of gated_mlp of few tokens go: per SM, since the first kernel's first CTA began there."""
import os, sys, torch, ikbo
torch.set_grad_enabled(False)
K, N, dev = 4096, 11008, "cuda"
r = lambda *s: (torch.randn(*s, device=dev) * s[-1] ** -.5).bfloat16()
wg, wu, wd = r(N, K), r(N, K), r(K, N)
flush = torch.empty(256 << 20, dtype=torch.uint8, device=dev); clean = torch.zeros(32 << 20, dtype=torch.int32, device=dev)
stamps = torch.zeros(2, 1024, 16, dtype=torch.int64, device=dev)
NAMES = ["start", "ring", "waited", "full", "1/4", "1/2", "3/4", "last", "done", "met", "end"]
def show(title, M, **env):
    os.environ.update({k: str(v) for k, v in env.items()}, WS_STAMPS=str(stamps.data_ptr()))
    x = r(M, K); f = lambda: torch.ops.ikbo.gated_mlp(x, wg, wu, None, None, wd, None, "silu")
    f(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): keep = f()
    rows = [[], []]
    for rep in range(6):
        stamps.zero_(); flush.zero_(); clean.amax(); g.replay(); torch.cuda.synchronize()
        if rep == 0: continue
        s = stamps.cpu(); used = [s[i][s[i, :, 0] != 0] for i in (0, 1)]
        base = {}
        for row in used[0].tolist(): base[row[15]] = min(base.get(row[15], 1 << 62), row[0])
        for i in (0, 1):
            for row in used[i].tolist():
                if row[15] in base: rows[i].append([v - base[row[15]] if v else -1 for v in row[:11]])
    print(title, M)
    for i in (0, 1):
        t = torch.tensor(rows[i], dtype=torch.float)
        out = []
        for j, n in enumerate(NAMES):
            v = t[:, j][t[:, j] >= 0]
            if len(v): q = torch.quantile(v, torch.tensor([.05, .5, .95, 1])).long().tolist(); out.append(f"{n} {q[1]} ({q[0]}..{q[2]}..{q[3]})")
        print("  " + ["gate", "down"][i], len(t) // 5, "CTAs:", "; ".join(out), flush=True)
    for k in [*env, "WS_STAMPS"]: del os.environ[k]
D = "WS1_"
p72 = dict(WS1_B=2, WS1_P=2, WS1_F=72, WS1_S=4)
for M in (64, 16):
    show("base", M); show("down S=2", M, WS1_S=2); show("down 72x4", M, **p72); show("down 72x4 ahead 6", M, **p72, WS1_N=6)
    show("down 32x2", M, WS1_F=32, WS1_S=2); show("down 56x4 next 4", M, WS1_F=56, WS1_S=4, WS2_N=4)
