"""Choices for short candidate attention side by side, then the clocks of its phases.
PYTHONPATH=<package with the scratch library>:<folder of attn_bench.py> python short.py"""
import ctypes, os, statistics
import numpy as np, torch
import ikbo
import attn_bench as A

torch.set_grad_enabled(False)
A.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
lib = ctypes.CDLL(os.path.join(os.path.dirname(ikbo.__file__), "libikbo.so"))
KEYS = ["IKBO_PARTS", "IKBO_KERNEL", "IKBO_GUESS", "IKBO_LATE", "IKBO_HINT", "IKBO_STAMPS", "IKBO_EARLY", "IKBO_AT_ONCE"]
OLD = "EARLY=0 AT_ONCE=1"
WAYS = {
    "one_B512_s1_L2048": ["", OLD, "AT_ONCE=1", "EARLY=0", "GUESS=0", "GUESS=1", "LATE=1", "PARTS=4"],
    "L1024_s1_r64": ["", OLD, "AT_ONCE=1", "EARLY=0", "GUESS=0", "GUESS=1", "GUESS=3", "GUESS=4", "AT_ONCE=1 GUESS=0", "HINT=1", "KERNEL=7 GUESS=4"],
    "L1024_s8_r64": ["", OLD, "AT_ONCE=1", "EARLY=0", "GUESS=0", "GUESS=1"],
    "L1024_s16_r64": ["", OLD, "AT_ONCE=1", "GUESS=0"],
}


def choose(way):
    for k in KEYS:
        os.environ.pop(k, None)
    for word in way.split():
        k, v = word.split("=")
        os.environ["IKBO_" + k] = v


def graph_of(sets, way):
    choose(way)
    for s in sets[:2]:
        s.ikbo()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        keep = [s.ikbo() for s in sets]
    choose("")
    return g, keep


def read_stamps():
    t, a = np.zeros((64, 160, 16), np.int64), np.zeros((64, 512, 8), np.int64)
    assert lib.ikbo_attention_stamps(t.ctypes.data_as(ctypes.c_void_p), a.ctypes.data_as(ctypes.c_void_p)) == 0
    return t, a


def phases(case, sets, us):
    g, keep = graph_of(sets, "STAMPS=1")
    n, next_slot = len(sets), lib.ikbo_attention_slot()
    A.timed(g.replay)
    old, old_adding = read_stamps()
    A.timed(g.replay)
    t, a = read_stamps()
    # What this replay hasn't written is an earlier case's.
    t[t[:, :, 12] <= old[:, :, 12].max()] = 0
    a[a[:, :, 0] <= old_adding[:, :, 0].max()] = 0
    slots = [(next_slot - n + i) % 64 for i in range(n)]
    span = {k: [] for k in ("between", "there", "work", "to", "adding", "over")}
    clocks = {k: [] for k in range(16)}
    adds = {k: [] for k in range(8)}
    for before, now in zip(slots[n // 4 : -1], slots[n // 4 + 1 :]):
        x, y, xa, ya = t[now], t[before], a[now], a[before]
        x, y = x[x[:, 12] > 0], y[y[:, 12] > 0]
        if not len(x) or not len(y):
            continue
        xa, ya = xa[xa[:, 7] > 0], ya[ya[:, 7] > 0]
        end = lambda m, ad: max(m[:, 14:16].max(), ad[:, 7].max() if len(ad) else 0)
        wait = np.median(x[:, 13])
        span["between"].append(wait - end(y, ya))  # the last before ended -> wait returns
        span["there"].append(wait - np.median(x[:, 12]))  # CTAs since, when it returns
        span["over"].append(x[:, 13].max() - x[:, 13].min())
        span["work"].append(x[:, 14:16].max() - wait)  # until the last has stored or kept
        if len(xa):
            span["to"].append(np.median(xa[:, 6]) - x[:, 14:16].max())
            span["adding"].append(xa[:, 7].max() - np.median(xa[:, 6]))
            for k in (1, 2, 4, 5):
                adds[k] += list(xa[:, k] - xa[:, 3])
        for k in range(12):
            v = x[:, k]
            clocks[k] += list((v - x[:, 1])[v > 0])
    names = {0: "start", 3: "tile found", 4: "K asked", 2: "q there", 5: "K there", 6: "scores", 7: "last product",
             8: "of the other", 9: "stored", 10: "of the other"}
    print(f"{case}: {us:.2f} us a launch, {len(x)} CTAs, {len(xa)} that add")
    print("   ns: end before -> wait returns {between}, (CTAs there since {there}, returns over {over}), -> last stored {work}, "
          "-> adding's wait returns {to}, -> added {adding}".format(
              **{k: int(np.median(v)) if v else "-" for k, v in span.items()}))
    show = lambda v: f"{np.median(v):.0f} ({np.percentile(v, 5):.0f}..{np.percentile(v, 95):.0f})"
    print("   clocks since wait returned: " + ", ".join(f"{name} {show(clocks[k])}" for k, name in names.items() if clocks[k]))
    if adds[5]:
        print("   adding: start {}, tile found {}, added {}, end {}".format(*(show(adds[k]) for k in (1, 2, 4, 5))))


for case, ways in WAYS.items():
    torch.cuda.empty_cache()
    i = A.Inputs(case)
    n = max(2, min(24, 200_000_000 // i.bytes + 1))
    sets = [i] + [A.Inputs(case, s) for s in range(1, n)]
    graphs, times = {}, {}
    for way in ways:
        try:
            choose(way)
            error = A.check(i)
            graphs[way] = graph_of(sets, way)
        except RuntimeError as e:
            print(f"{case} {way}: {str(e)[:80]}")
            continue
        if not error < 6e-3:
            print(f"WRONG {case} {way}: {error:.3g}")
        times[way] = []
    for _ in range(5):
        for way, (g, _) in graphs.items():
            times[way].append(statistics.median(A.timed(g.replay) for _ in range(3)) / n)
    us = {way: statistics.median(v) for way, v in times.items()}
    print(f"{case}: " + ", ".join(f"{way or 'default'} {v:.2f}" for way, v in us.items()), flush=True)
    del graphs
    if not case.startswith("L1024_s16"):
        phases(case, sets, us[""])
