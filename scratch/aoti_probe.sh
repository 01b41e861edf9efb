# aoti_probe.sh DIR: a package of a plain Linear on CUDA, compiled and loaded, with where it stands if it doesn't come back
D=$1; mkdir -p $D; cd $D; export TORCHINDUCTOR_VEC_ISA_OK=1 TORCHINDUCTOR_CACHE_DIR=$D/cache; T0=$(date +%s)
cat > c.py <<'P'
import torch, time
t = time.time()
m = torch.nn.Linear(8, 8).cuda().eval(); x = torch.randn(4, 8, device="cuda")
with torch.no_grad():
    e = torch.export.export(m, (x,)); print("exported", time.time() - t, flush=True)
    torch._inductor.aoti_compile_and_package(e, package_path="plain.pt2"); print("compiled", time.time() - t, flush=True)
    torch.save((x, m(x)), "data.pt")
P
cat > l.py <<'P'
import faulthandler, torch, time, sys, os
faulthandler.enable(); faulthandler.dump_traceback_later(20, repeat=True)
x, want = torch.load("data.pt"); torch.cuda.synchronize(); print("data", flush=True); t = time.time()
p = torch._inductor.aoti_load_package(os.path.abspath("plain.pt2")); print("loaded", time.time() - t, flush=True)
print("error", (p(x) - want).abs().max().item(), time.time() - t, flush=True)
P
timeout 120 python3 -W ignore c.py 2>&1 | tail -n 5; echo "compile $(( $(date +%s) - T0 )) s"
python3 -c "import zipfile; [print(i.file_size, i.filename) for i in zipfile.ZipFile('plain.pt2').infolist()]" 2>&1 | tail -n 12
timeout 70 python3 -W ignore l.py > l.log 2>&1 & P=$!; for i in $(seq 12); do sleep 2; kill -0 $P 2>/dev/null || break; done
if kill -0 $P 2>/dev/null; then C=$(pgrep -P $P | head -1); C=${C:-$P}; echo "still loading after $i tries: $C"; grep -E "State|Threads" /proc/$C/status; cut -d' ' -f14,15 /proc/$C/stat; pgrep -P $C -a | cut -c1-150; (timeout 25 cuda-gdb -p $C -batch -ex "thread apply all bt 14" 2>&1 | grep -E "^#|^Thread" | cut -c1-180 | head -60); fi
wait $P; echo "load rc $?"; tail -n 25 l.log | cut -c1-200; echo "all $(( $(date +%s) - T0 )) s"
