import ctypes, os, statistics, torch
lib = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "libbw.so"))
lib.scratch_bw.restype = ctypes.c_char_p
dev = "cuda"; G = (22016, 4096); D = (4096, 11008)
gs = [torch.randn(*G, device=dev).bfloat16() for _ in range(2)]; ds = [torch.randn(*D, device=dev).bfloat16() for _ in range(2)]
flush = torch.empty(256 << 20, dtype=torch.uint8, device=dev); clean = torch.zeros(32 << 20, dtype=torch.int32, device=dev)
def go(w, F, R, kb, slots, split, hint, promo, linear, per, grid):
    shared = (228 // per - 2) * 1024
    slots = min(slots, shared // (R * 128 * kb))
    err = lib.scratch_bw(*[ctypes.c_void_p(w.data_ptr())] , *[ctypes.c_int64(v) for v in (w.shape[0], w.shape[1], F, R, kb, slots, split.bit_length() - 1, hint, promo, linear, shared, grid)], ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    assert not err, err
def once(g):
    flush.zero_(); clean.amax(); s, e = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    s.record(); g.replay(); e.record(); e.synchronize(); return s.elapsed_time(e) * 500
cases = []
def case(what, F, R, kb, split=1, slots=64, hint=1, promo=2, linear=0, per=2, grid=None):
    ws = gs if what == "gate" else ds
    grid = grid or -(-ws[0].shape[0] // F) * split
    g = torch.cuda.CUDAGraph()
    go(ws[0], F, R, kb, slots, split, hint, promo, linear, per, grid); torch.cuda.synchronize()
    with torch.cuda.graph(g):
        for w in ws: go(w, F, R, kb, slots, split, hint, promo, linear, per, grid)
    cases.append((f"{what:4} F {F:3} box {R:3}x{64*kb:3} split {split} grid {grid:3} per {per} slots {slots:2} hint {hint} promo {promo} {'LINEAR' if linear else ''}", g, ws[0].nbytes, []))
for what in ("gate", "down"):
    for per, grid in ((2, 264), (1, 132)):
        for R in (64, 128): case(what, R, R, 1, linear=1, per=per, grid=grid)
case("gate", 88, 88, 1); case("gate", 88, 88, 1, hint=0); case("gate", 88, 88, 1, promo=3); case("gate", 88, 88, 1, promo=0)
for slots in (2, 3, 4, 6): case("gate", 88, 88, 1, slots=slots)
case("gate", 88, 88, 2); case("gate", 88, 44, 2); case("gate", 88, 22, 4); case("gate", 88, 11, 8)
case("gate", 128, 128, 1); case("gate", 168, 168, 1, per=1); case("gate", 168, 84, 2, per=1); case("gate", 168, 42, 4, per=1); case("gate", 168, 168, 1, per=2); case("gate", 168, 168, 1, per=1, promo=3)
case("down", 64, 64, 1, 2, per=1); case("down", 64, 64, 1, 2, per=2); case("down", 64, 64, 1, 4); case("down", 64, 32, 2, 4); case("down", 64, 16, 4, 4); case("down", 64, 64, 1, 4, promo=3); case("down", 64, 64, 1, 4, hint=0)
case("down", 128, 128, 1, 4, per=1); case("down", 128, 64, 2, 4, per=1); case("down", 128, 32, 4, 4, per=1)
case("down", 128, 128, 1, 8); case("down", 32, 32, 1, 1, per=1); case("down", 32, 32, 4, 1, per=1); case("down", 32, 32, 1, 2); case("down", 32, 32, 4, 2); case("down", 16, 16, 1); case("down", 16, 16, 4)
for _ in range(9):
    for c in cases: c[3].append(once(c[1]))
for name, g, n, t in cases:
    m = statistics.median(t); print(f"{name:75} {m:7.2f} us  {n / m / 1e6:5.2f} TB/s")
