"""Bar cases of the gated MLP issue, interleaved. python gated_bench.py [device_tests.so] [parts]
parts: any of mlp,decode,stream,gemm,gated,train,train (default all). PYTHONPATH must hold ikbo."""
import ctypes, os, statistics, sys, time
import torch, torch.nn.functional as F
import ikbo
T0 = time.time()
LIB = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("IKBO_DEVICE_TESTS", "build/cmake/libikbo_device_tests.so")
PARTS = (sys.argv[2] if len(sys.argv) > 2 else "decode,stream,tower,gated,gemm,train,mlp").split(",")
lib = ctypes.CDLL(os.path.abspath(LIB)) if os.path.exists(LIB) else None  # then the parts that need it are left out
if lib is None: PARTS = [p for p in PARTS if p not in ("stream", "gated", "gemm")]; print("no", LIB, "- parts", PARTS)
P = torch.cuda.get_device_properties(0)
SMS, L2 = P.multi_processor_count, P.L2_cache_size
flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
BF = torch.bfloat16
def pointer(t): return ctypes.c_void_p(t.data_ptr() if t is not None else None)
def stream(): return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
def check(error):
    if error is not None: raise RuntimeError(error.decode())
for f in ("gemm", "gated", "weight_stream") if lib else (): getattr(lib, f"ikbo_test_{f}").restype = ctypes.c_char_p
I = ctypes.c_int64
def gemm(a, b, d, kernel):
    check(lib.ikbo_test_gemm(pointer(a), pointer(b), pointer(d), I(a.shape[0]), I(b.shape[0]), I(a.shape[1]), I(a.stride(0)), I(b.stride(0)), I(d.stride(0)), ctypes.c_int(1), ctypes.c_int(kernel), ctypes.c_int(SMS), I(L2), stream()))
def gated(x, g, u, d, kernel):
    check(lib.ikbo_test_gated(pointer(x), pointer(g), pointer(u), None, None, pointer(d), None, None, I(x.shape[0]), I(g.shape[0]), I(x.shape[1]), I(kernel), I(SMS), I(L2), stream()))
def streamed(x, w0, w1, d, split):
    check(lib.ikbo_test_weight_stream(pointer(x), pointer(w0), pointer(w1), None, None, pointer(d), None, None, I(x.shape[0]), I(w0.shape[0]), I(x.shape[1]), I(split), I(SMS), I(L2), stream()))
def timed(f):
    s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_(); s.record(); f(); e.record(); e.synchronize(); return s.elapsed_time(e) * 1e3
def rounds(calls, n=9, repeats=2, per=1):
    """calls: {name: f}; interleaved; prints median us and median of per-round time / first's."""
    for f in calls.values(): f()
    torch.cuda.synchronize(); samples = {k: [] for k in calls}; order = list(calls)
    for _ in range(n):
        for k in order: samples[k].append(statistics.median(timed(calls[k]) for _ in range(repeats)) / per)
        order = order[1:] + order[:1]
    return samples
def show(title, samples, base, flops=None):
    print(f"{title}  [{time.time() - T0:.0f} s]")
    for k, v in samples.items():
        us = statistics.median(v); ratio = statistics.median(b / a for a, b in zip(v, samples[base]))
        print(f"   {k:34s} {us:9.2f} us  {base}/this {ratio:6.3f}" + (f"  {flops / us / 1e6:6.0f} TF" if flops else ""), flush=True)
def graph(calls):
    torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): keep = [c() for c in calls]
    return g.replay
def randn(*s, scale=1.0): return torch.randn(s, device="cuda", dtype=BF) * scale
def geglu(x, g, u, d): return F.linear(F.gelu(F.linear(x, g), approximate="tanh") * F.linear(x, u), d)
def ikbo_mlp(x, g, u, d): return torch.ops.ikbo.gated_mlp(x, g, u, None, None, d, None, "gelu_tanh")
def weights(D, H): return randn(H, D, scale=D**-.5), randn(H, D, scale=D**-.5), randn(D, H, scale=H**-.5)
def config(op):
    from ikbo._library import library
    return library().ikbo_explain(op.encode()).decode()
n = 1 << 30; a = torch.empty(n, dtype=torch.uint8, device="cuda"); b = torch.empty_like(a)
COPY = 2 * n / statistics.median(timed(lambda: b.copy_(a)) for _ in range(7)) / 1e6; del a, b
print(f"{P.name} copy {COPY:.3f} TB/s")
with torch.inference_mode():
    if "decode" in PARTS:
        D, H = 4096, 11008; sets = [weights(D, H) for _ in range(2)]; floor = 6 * D * H / COPY / 1e6
        for M in (1, 8, 16, 32, 64):
            x = randn(M, D); torch._dynamo.reset(); c = torch.compile(geglu, dynamic=False)
            y, r = ikbo_mlp(x, *sets[0]).float(), geglu(x, *sets[0]).float()
            fs = {"ikbo": ikbo_mlp, "eager": geglu} | ({"compile": c} if M in (1, 16, 64) else {})
            reps = {k: graph([lambda w=w, f=f: f(x, *w) for w in sets * 4]) for k, f in fs.items() if f(x, *sets[0]) is not None}
            s = rounds(reps, repeats=1, per=8); show(f"decode {M}x{D}x{H}: floor {floor:.1f} us, relerr {((y - r).norm() / r.norm()).item():.1e}", s, "eager")
            print(f"   ikbo / floor {statistics.median(s['ikbo']) / floor:.3f}   {config('gated_mlp')[:400]}")
            halves = {"gated_linear": lambda w: torch.ops.ikbo.gated_linear(x, w[0], w[1], None, None, "gelu_tanh")}
            h = halves["gated_linear"](sets[0]); halves["linear_act"] = lambda w: torch.ops.ikbo.linear_act(h, w[2], None, "none")
            s = rounds({k: graph([lambda w=w, f=f: f(w) for w in sets * 4]) for k, f in halves.items()}, n=5, repeats=1, per=8)
            print("   alone: " + ", ".join(f"{k} {statistics.median(v):.2f} us" for k, v in s.items()), flush=True)
        del sets
    if "stream" in PARTS:
        for M in (1, 16, 64):
            for name, N, K, n in (("gated", 11008, 4096, 2), ("down", 4096, 11008, 1)):
                x, d = randn(M, K), randn(M, N); w = [(randn(N, K), randn(N, K) if n == 2 else None) for _ in range(3)]
                calls = {f"{name} split {k}": graph([lambda v=v, k=k: streamed(x, *v, d, k) for v in w * 4]) for k in (1, 2, 4, 8)}
                s = rounds(calls, n=5, repeats=1, per=12); floor = 2 * n * N * K / COPY / 1e6
                print(f"stream {name} M={M}, floor {floor:.1f} us: " + ", ".join(f"{k.split()[-1]}: {statistics.median(v):.2f} ({statistics.median(v) / floor:.3f})" for k, v in s.items()), flush=True)
        del w
    if "tower" in PARTS:
        ku, kc, n1, n2 = 1024, 512, 512, 256
        for B in (2000, 200, 4096):
            users = ikbo.candidate_map(counts=[B], device="cuda"); m = (users.cand_to_user, users.user_offsets, users.order)
            sets = [(randn(B, kc), randn(1, ku), randn(n1, kc, scale=.03), randn(n1, ku, scale=.03), randn(n1), randn(n2, n1, scale=.04), randn(n2), randn(1, n2, scale=.06), randn(1)) for _ in range(40)]
            def decomposed(x, u, wc, wu, b1, w2, b2, w3, b3): return F.linear(F.relu(F.linear(F.relu(F.linear(x, wc) + F.linear(u, wu, b1).index_select(0, m[0])), w2, b2)), w3, b3)
            def ours(x, u, wc, wu, b1, w2, b2, w3, b3):
                h = torch.ops.ikbo.linear_act(torch.ops.ikbo.concat_linear(x, u, wc, wu, b1, *m, "relu"), w2, b2, "relu")
                return torch.ops.ikbo.linear_act(h, w3, b3, "none")
            torch._dynamo.reset(); c = torch.compile(decomposed, dynamic=False)
            fs = {"ikbo": ours, "compile": c, "eager": decomposed}; y, r = ours(*sets[0]).float(), decomposed(*sets[0]).float(); c(*sets[0])
            s = rounds({k: graph([lambda w=w, f=f: f(*w) for w in sets]) for k, f in fs.items()}, n=7, repeats=1, per=40)
            show(f"tower B={B}, one user: relerr {((y - r).norm() / r.norm()).item():.1e}", s, "ikbo")
            parts = {"concat_linear": lambda x, u, wc, wu, b1, *_: torch.ops.ikbo.concat_linear(x, u, wc, wu, b1, *m, "relu"), "linear_act 512-256": lambda *a: torch.ops.ikbo.linear_act(h1, a[5], a[6], "relu"), "linear_act 256-1": lambda *a: torch.ops.ikbo.linear_act(h2, a[7], a[8], "none")}
            h1, h2 = randn(B, n1), randn(B, n2)
            for f in parts.values(): f(*sets[0])
            s = rounds({k: graph([lambda w=w, f=f: f(*w) for w in sets]) for k, f in parts.items()}, n=5, repeats=1, per=40)
            print("   alone: " + ", ".join(f"{k} {statistics.median(v):.2f} us" for k, v in s.items()), flush=True)
        del sets
    SHAPES = [(8192, 768, 3072), (16384, 2048, 8192), (8192, 4096, 11008)]
    if "gated" in PARTS:
        for M, D, H in SHAPES + [(2000, 512, 256), (512, 1024, 4096)]:
            x, (g, u, d) = randn(M, D), weights(D, H); out = randn(M, H); h = torch.empty_like(out)
            gu = torch.cat([g, u]); wide = randn(M, 2 * H)
            calls = {"cublas 2N": lambda: torch.mm(x, gu.T, out=wide)}
            for k in (-1, 0, 1, 2, 3, 4, 5, 6):
                try: gated(x, g, u, out, k); torch.cuda.synchronize()
                except RuntimeError as e: print("   kernel", k, e); continue
                calls[f"gated kernel {k}"] = lambda k=k: gated(x, g, u, out, k)
            calls["cublas down"] = lambda: F.linear(h, d); calls["linear_act down"] = lambda: torch.ops.ikbo.linear_act(h, d, None, "none")
            h.copy_(out); s = rounds(calls, n=5); show(f"gated {M}x{D}x{H}", s, "cublas 2N", 4 * M * D * H)
    if "gemm" in PARTS:
        for M, N, K in [(8192, 8192, 8192), (8192, 3072, 768), (8192, 768, 3072), (4096, 4096, 4096)]:
            a, b = randn(M, K), randn(N, K); d = randn(M, N)
            calls = {"cublas": lambda: torch.mm(a, b.T, out=d)}
            for k in (-1, 0, 1, 2, 3, 4, 5, 6, 7): calls[f"kernel {k}"] = lambda k=k: gemm(a, b, d, k)
            show(f"gemm {M}x{N}x{K}", rounds(calls, n=7), "cublas", 2 * M * N * K)
    if "mlp" in PARTS:
        for M, D, H in SHAPES:
            x, w = randn(M, D), weights(D, H); torch._dynamo.reset(); c = torch.compile(geglu, dynamic=False)
            y, r = ikbo_mlp(x, *w).float(), geglu(x, *w).float(); e = ((y - r).norm() / r.norm()).item(); del y, r
            s = rounds({"ikbo": lambda: ikbo_mlp(x, *w), "compile": lambda: c(x, *w), "eager": lambda: geglu(x, *w)})
            show(f"mlp {M}x{D}x{H}: relerr {e:.1e}", s, "ikbo", 6 * M * D * H)
            print("   ", config("gated_mlp")[:500])
if "train" in PARTS:
    for M, D, H in [(8192, 768, 3072), (8192, 4096, 11008)][: 1 if "full" not in PARTS else 2]:
        leaves = [t.requires_grad_() for t in (randn(M, D), *weights(D, H))]; grad = randn(M, D)
        torch._dynamo.reset(); c = torch.compile(geglu, dynamic=False)
        def step(f): return lambda: torch.autograd.grad(f(*leaves), leaves, grad)
        calls = {"ikbo": step(ikbo_mlp), "compile": step(c), "eager": step(geglu)}
        results = {k: f() for k, f in calls.items()}
        for k in ("compile", "eager"):
            print("  ", k, "relerr of ikbo's grads x, gate, up, down:", ["%.1e" % ((a - b).float().norm() / b.float().norm()).item() for a, b in zip(results["ikbo"], results[k])])
        show(f"fwd+bwd {M}x{D}x{H}", rounds(calls), "ikbo", 18 * M * D * H)
        for op in ("gated_mlp_fwd", "gated_mlp_bwd"): print("   ", op, config(op)[:600])
        try:
            with torch.profiler.profile() as prof: calls["ikbo"](); torch.cuda.synchronize()
            for e in sorted((e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start): print(f"      {e.device_time:8.1f} us {e.name[:110]}")
        except Exception as e: print("profile:", repr(e)[:200])
print(f"total {time.time() - T0:.0f} s")
