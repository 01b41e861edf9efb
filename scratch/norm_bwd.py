"""Backward cases of the norms, candidates chosen by environment: copy_ratio of each.
  PYTHONPATH=... python build/scratch/norm_bwd.py [--short]"""
import contextlib, io, os, sys, time
short = "--short" in sys.argv
sys.argv = ["norm_bench", "_bwd_", "--rounds", "5"]
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
import norm_bench as nb

t0 = time.time()
KEYS = {"L": "IKBO_NORM_LEAD", "W": "IKBO_NORM_WARPS", "A": "IKBO_NORM_ALONE", "S": "IKBO_NORM_STAGES"}
def choose(text):
    for k in KEYS.values(): os.environ.pop(k, None)
    for part in text.split():
        if part != "-": os.environ[KEYS[part[0]]] = part[1:]

def same_bits(M, N, one, other):
    ops = torch.ops.ikbo
    x, g = (torch.randn(M, N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    w, b = (torch.randn(N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    st = ops.layer_norm_fwd(x, w, b, 1e-6)[1:]
    out = []
    for c in (one, other, other):
        choose(c)
        out.append(ops.layer_norm_bwd(g, x, w, b, *st, 0.0, 1, 7))
    ok = all(torch.equal(a, c) for o in out[1:] for a, c in zip(out[0], o))
    xd, gd = x[:512].double(), g[:512].double()
    xd.requires_grad_()
    torch.nn.functional.layer_norm(xd, (N,), w.double(), None, 1e-6).backward(gd)
    err = ((out[0][0][:512].double() - xd.grad).norm() / xd.grad.norm()).item()
    dw = torch.zeros(N, dtype=torch.float64, device="cuda"); db = dw.clone()
    for i in range(0, M, 512):
        s = slice(i, i + 512)
        gg = g[s].double(); xh = (x[s].double() - st[0][s].double().view(-1, 1)) * st[1][s].double().view(-1, 1)
        dw += (gg * xh).sum(0); db += gg.sum(0)
    e = [((out[0][i].double() - t).norm() / t.norm()).item() for i, t in ((1, dw), (2, db))]
    print(f"{M}x{N} {one} = {other}: bits {'same' if ok else 'DIFFER'}; errors dx {err:.1e} dw {e[0]:.1e} db {e[1]:.1e} (want < 3e-3)", flush=True)
    choose("-")

narrow, wide = ["-", "S3"], ["L2", "L0", "L1", "L4", "W16"]
CASES = [(131072, 128, narrow), (32768, 256, narrow), (32768, 384, narrow), (32768, 768, narrow),
         (32768, 1024, narrow), (32768, 2048, ["-"]), (32768, 4096, ["-", "W16"]),
         (1024, 12288, ["-", "A32"]), (32768, 8192, wide), (32768, 16384, wide + ["A64 L0", "A64 L2"]),
         (32768, 32768, wide), (16384, 65536, wide), (8192, 131072, wide), (4096, 262144, ["L2", "L0", "L1"])]
FP32 = [(16384, 4096, ["L2", "L0", "W16"]), (4096, 131072, ["L2", "L0"])]
ODD = [(522240, 257, ["-"]), (174592, 769, ["-"]), (32768, 4095, ["-"])]
print(torch.cuda.get_device_name(), torch.__version__)
for args in ((16384, 16384, "L0", "L2"), (4096, 131072, "L0", "L1"), (8192, 8192, "L0", "-"), (8192, 4096, "-", "-"), (16384, 1024, "-", "S3")):
    same_bits(*args)
    torch.cuda.empty_cache()
for cases, kw in ((CASES, {}), (FP32, {"dtype": torch.float32, "tag": "_fp32"}), (ODD, {"tag": "_odd"})):
    for M, N, candidates in cases:
        table = {}
        for c in candidates[: 1 if short else None]:
            choose(c)
            nb.results.clear()
            with contextlib.redirect_stdout(io.StringIO()) as text:
                nb.shape(M, N, fwd=False, **kw)
            if not nb.results: print("  ", c, text.getvalue()[-300:])
            for name, us, cu, r in nb.results: table.setdefault(name, []).append((c, us, cu, r))
        for name, rows in table.items():
            bar = nb.bar(name)
            best = max(r for _, _, _, r in rows)
            cells = "  ".join(f"[{c}] {us:.1f}us {r:.3f}" for c, us, _, r in rows)
            print(f"{'ok  ' if best >= bar else 'MISS'} {name:24s} bar {bar} copy {rows[0][2]:.1f}us  {cells}", flush=True)
        choose("-")
print(f"{time.time() - t0:.0f} s")
