"""Norm configs side by side, with the library of scratch/variant (env IKBO_N_*).
  PYTHONPATH=scratch/variant python scratch/sweep.py [group ...]
Prints a table: case x variant -> copy ratio."""
import os, sys, statistics, time
argv = sys.argv[1:]; sys.argv = sys.argv[:1]
sys.path.insert(0, os.path.dirname(__file__))
import torch
import norm_bench as nb
ops = torch.ops.ikbo
INF = str(10**15)
FW = {"default": {}, "direct": {"kDirectBytes": INF}, "stages2": {"FSTAGES": "2"}, "stages4": {"FSTAGES": "4"}, "stage1K": {"kStageBytes": "1024"}, "stage4K": {"kStageBytes": "4096"}, "persm1": {"FPERSM": "1"}, "persm3": {"FPERSM": "3"}}
FC = {"default": {}, "direct": {"kDirectBytes": INF}, "noticket": {"kTicketBytes": INF}, "stages2": {"FSTAGES": "2"}, "stages3": {"FSTAGES": "3"}, "smem200": {"FSMEM": "200", "FSTAGES": "6"}, "block1": {"kTicketStage": "1"}, "block16K": {"kTicketStage": "16384"}}
FL = {"default": {}, "direct": {"kDirectBytes": INF}, "stages2": {"FSTAGES": "2"}, "stages3": {"FSTAGES": "3"}, "smem200": {"FSMEM": "200", "FSTAGES": "6"}}
BW = {"default": {}, "stages1": {"BSTAGES": "1"}, "stages3": {"BSTAGES": "3"}, "warps8": {"BWARPS": "8"}, "warps10": {"BWARPS": "10"}, "stage1K": {"kStageBytes": "1024"}, "stage4K": {"kStageBytes": "4096"}}
BC = {"default": {}, "stages2": {"BSTAGES": "2"}, "stages3": {"BSTAGES": "3"}, "smem144": {"BSMEM": "144"}, "smem216": {"BSMEM": "216"}, "persm1": {"BCTAPERSM": "1"}}
GROUPS = {
 "fw": ("fwd", FW, [(131072, 128), (32768, 256), (32768, 384), (32768, 512), (32768, 640), (32768, 768), (32768, 1024), (522240, 257), (174592, 769)]),
 "fc": ("fwd", FC, [(32768, 2048), (32768, 4096), (32768, 8192), (32768, 16384), (32768, 4095)]),
 "fl": ("fwd", FL, [(32768, 32768), (16384, 65536), (4096, 262144)]),
 "bw": ("bwd", BW, [(131072, 128), (32768, 256), (32768, 384), (32768, 768), (32768, 1024), (522240, 257), (174592, 769)]),
 "bc": ("bwd", BC, [(32768, 2048), (32768, 4096), (1024, 12288), (32768, 8192), (32768, 16384), (32768, 32768), (4096, 262144), (32768, 4095)]),
}
def setenv(v):
    for k in list(os.environ):
        if k.startswith("IKBO_N_"): del os.environ[k]
    for k, x in v.items(): os.environ["IKBO_N_" + k] = x
for g in argv or list(GROUPS):
    direction, variants, shapes = GROUPS[g]
    print(f"== {g}: " + " ".join(f"{v:>9s}" for v in variants), flush=True)
    for M, N in shapes:
        b = 2 * M * N; reads = 1 if direction == "fwd" else 2; total = (reads + 1) * b
        count = nb.sets_of(total); reps = 2 if total > 1.5e9 else 1
        try:
            mk = lambda *s: [torch.randn(*s, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
            xs, ws, bs = mk(M, N), mk(N), mk(N)
            gs = mk(M, N) if direction == "bwd" else None
            cus, form, cg, cc, _ = nb.copies(total, reads)
            for kind in ("rms", "ln"):
                row = []
                idx = list(range(count)) * reps
                if direction == "bwd":
                    setenv({})
                    st = [(ops.rms_norm_fwd(xs[i], ws[i], None, 1e-6)[1:] if kind == "rms" else ops.layer_norm_fwd(xs[i], ws[i], bs[i], 1e-6)[1:]) for i in range(count)]
                for v, e in variants.items():
                    setenv(e)
                    try:
                        if direction == "fwd":
                            f = (lambda i: ops.rms_norm(xs[i], ws[i], None, 1e-6)) if kind == "rms" else (lambda i: ops.layer_norm(xs[i], ws[i], bs[i], 1e-6))
                        else:
                            f = (lambda i: ops.rms_norm_bwd(gs[i], xs[i], ws[i], None, st[i][0], 0.0, 1, 3)[:2]) if kind == "rms" else (lambda i: ops.layer_norm_bwd(gs[i], xs[i], ws[i], bs[i], *st[i], 0.0, 1, 7))
                        gr = nb.graph_of([(lambda i=i: f(i)) for i in idx])
                        r = statistics.median(nb.sample(cg, cc) / nb.sample(gr, len(idx)) for _ in range(5))
                        row.append(f"{r:9.3f}")
                        del gr
                    except Exception as ex:
                        row.append("    error"); print(v, str(ex)[:150])
                print(f"{kind:3s} {M:7d}x{N:<7d} copy {cus:8.1f} " + " ".join(row), flush=True)
        except Exception as ex:
            print(M, N, type(ex).__name__, str(ex)[:200])
        xs = ws = bs = gs = st = None; nb.copy_cache.clear(); torch.cuda.empty_cache()
print(f"{time.time() - nb.t00:.0f} s")
