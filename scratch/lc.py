"""Split kernel, fused launch, clocks."""
import ctypes, os, sys, statistics
sys.path.insert(0, '.')
import torch, ikbo
from benchmarks.cases import Case, Draw
from benchmarks.timing import CudaTimer, measure
from benchmarks.ops import linear_compression as L
from types import SimpleNamespace as NS
out = os.environ.get('OUT', '/tmp')
lib = ctypes.CDLL('build/cmake/libikbo_device_tests.so')
P, I = ctypes.c_void_p, ctypes.c_int64
lc_f = lib.ikbo_test_linear_compression; lc_f.restype = ctypes.c_char_p
lc_f.argtypes = [P, I, P, P, P, P, I, ctypes.c_bool, I, I, I, I, I, I, P, P]
stream = lambda: torch.cuda.current_stream().cuda_stream
def chk(e):
    if e is not None: raise RuntimeError(e.decode())
def split(kernel):
    def make(i):
        wc, wu = L._rows_apart(i.w_cand), L._rows_apart(i.w_user)
        M, N = wc.shape[0], i.e_cand.shape[2]
        def run():
            o = i.e_cand.new_empty(i.e_cand.shape[0], M, N)
            chk(split_f(wc.data_ptr(), wc.stride(0), i.e_cand.data_ptr(), *i.e_cand.shape[:2], wu.data_ptr(), wu.stride(0),
                i.e_user.data_ptr(), *i.e_user.shape[:2], o.data_ptr(), i.map.cand_to_user.data_ptr(), M, N, kernel, stream()))
            return o
        return run
    return make
def fused(i, clocks=None):
    wc, wu = L._rows_apart(i.w_cand), L._rows_apart(i.w_user)
    M, N = wc.shape[0], i.e_cand.shape[2]
    U = i.e_user.shape[0]
    part = i.e_cand.new_empty(U, M, N); flags = torch.zeros(U * 8, dtype=torch.int32, device='cuda')
    def run():
        o = i.e_cand.new_empty(i.e_cand.shape[0], M, N)
        chk(fl(wc.data_ptr(), wc.stride(0), i.e_cand.data_ptr(), *i.e_cand.shape[:2], wu.data_ptr(), wu.stride(0),
            i.e_user.data_ptr(), *i.e_user.shape[:2], part.data_ptr(), o.data_ptr(), i.map.cand_to_user.data_ptr(), M, N, flags.data_ptr(),
            None if clocks is None else clocks.data_ptr(), stream()))
        return o
    return run
def two(i):  # candidates' launch alone
    part = i.e_cand.new_zeros(i.e_user.shape[0], i.w_cand.shape[0], i.e_cand.shape[2])
    wc = L._rows_apart(i.w_cand)
    def run():
        torch.ops.ikbo.linear_compression_add(i.e_cand, wc, part, None, *(i.map.cand_to_user, i.map.user_offsets, i.map.order))
    return run
cs = {c.name: c for c in L.cases(lambda x: x)}
def with_extra(c, extra, keep=('ikbo', 'torch_decomposed_padded', 'torch_decomposed_compiled'), inputs=None):
    con = {k: v for k, v in c.contestants.items() if k in keep}
    return Case(c.name, inputs or c.inputs, con | extra, ('bf16',))
timer = CudaTimer(); dev = torch.device('cuda', 0)
def show(rows):
    print(rows[0]['case'], rows[0].get('timing'), ', '.join(f"{r['impl']} {r.get('us')} ({r.get('ratio')}) {r.get('error','')}" + (f" e{r['relerr']:.1g}" if 'relerr' in r else '') for r in rows), flush=True)
def small(B, ratio, M=433, N=256, Ku=1178, Kc=866):
    c = cs['B8_r8']
    def inputs(draw):
        u = draw.user_map(B, ratio)
        return NS(e_cand=draw.randn(B, Kc, N), e_user=draw.randn(u.n_users, Ku, N), w_cand=draw.randn(M, Kc), w_user=draw.randn(M, Ku), map=u)
    return Case(f"B{B}_r{ratio}_M{M}", inputs, c.contestants)
which = sys.argv[1:]
if 'split' in which:
    for B, r in ((1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 8), (64, 8)):
        show(measure(with_extra(small(B, r), {}), 'bf16', dev, timer, 7))
    show(measure(with_extra(small(8, 8, 128, 64, 512, 512), {}), 'bf16', dev, timer, 7))
if 'clocks' in which:
    i = cs['B1024_r70'].inputs(Draw(dev, torch.bfloat16))
    wc = L._rows_apart(i.w_cand); part = i.e_cand.new_zeros(i.e_user.shape[0], 433, 256); o = i.e_cand.new_empty(1024, 433, 256)
    part.normal_()
    cl = torch.zeros(400, dtype=torch.int64, device='cuda')
    ctas = 132
    def go(clocks):
        chk(lc_f(wc.data_ptr(), wc.stride(0), i.e_cand.data_ptr(), o.data_ptr(), part.data_ptr(), i.map.cand_to_user.data_ptr(), i.e_user.shape[0], False,
            1024, 433, 256, 866, 0, ctas, clocks.data_ptr() if clocks is not None else None, stream()))
    for warm in (0, 300, 1500):
        res = []
        for rep in range(9):
            for _ in range(warm // 9): go(None)
            cl.zero_(); go(cl); torch.cuda.synchronize(); v = cl[cl > 0]; res.append((int(v.max()), float(v.double().mean())))
        print('clocks, warm', warm, 'slowest', sorted(r[0] for r in res), 'mean', round(statistics.median(r[1] for r in res)), flush=True)
if 'fused' in which:
    for name in ('B1024_r70', 'B512_r70', 'B1024_r10', 'B1024_r2'):
        show(measure(with_extra(cs[name], {'fused': fused}, ('ikbo', 'torch_decomposed_padded')), 'bf16', dev, timer, 11))
