"""gated_mlp of few tokens and a copy of its weights' bytes, one call a graph, behind a flush that leaves dirty lines
in L2 (as benchmarks/timing.py's does), or clean ones."""
import statistics
import torch, ikbo
torch.set_grad_enabled(False)
K, N, dev = 4096, 11008, "cuda"
r = lambda *s: (torch.randn(*s, device=dev) * s[-1] ** -.5).bfloat16()
wg, wu, wd = r(N, K), r(N, K), r(K, N)
src = torch.empty(N * K * 3 // 2, dtype=torch.bfloat16, device=dev); dst = torch.empty_like(src)
flush = torch.empty(256 << 20, dtype=torch.uint8, device=dev)
clean = torch.zeros(64 << 20, dtype=torch.int32, device=dev)
def dirty_flush(): flush.zero_()
def clean_flush(): flush.zero_(); clean.amax()
def graph_of(fn):
    fn(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): keep = fn()
    return g
def timed(g, how):
    t = []
    for _ in range(15):
        how(); s, e = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        s.record(); g.replay(); e.record(); e.synchronize(); t.append(s.elapsed_time(e) * 1e3)
    return round(statistics.median(t), 2)
calls = {"copy": lambda: dst.copy_(src)}
for M in (1, 16, 64):
    x = r(M, K)
    calls[f"{M} tokens"] = lambda x=x: torch.ops.ikbo.gated_mlp(x, wg, wu, None, None, wd, None, "silu")
    calls[f"{M} eager"] = lambda x=x: torch.nn.functional.linear(torch.nn.functional.silu(torch.nn.functional.linear(x, wg)) * torch.nn.functional.linear(x, wu), wd)
for name, call in calls.items():
    g = graph_of(call); print(f"{name:10} dirty {timed(g, dirty_flush):7} clean {timed(g, clean_flush):7}", flush=True)
