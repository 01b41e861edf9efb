# tests, sanitizers (phase A), then records (phase B)
START=$(date +%s); t() { echo "== $1 $(( $(date +%s) - START )) s"; }
ROOT=$PWD; S=$ROOT/build/scratch; I="python3 -m pip install -q --no-index --no-deps --no-compile"
$I --target /tmp/site build/wheel312/*.whl; mv python /tmp/python_away$RANDOM
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONHASHSEED=0 PATH=$PATH:/usr/local/cuda/bin IKBO_COMMIT=$(cat build/commit) IKBO_DEVICE_TESTS=$ROOT/build/cmake/libikbo_device_tests.so PYTHONPATH=/tmp/site:$S:$ROOT
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/inductor/triton
P="-q -p no:cacheprovider -p no:logging -p conftest_fail -W ignore --dist worksteal --tb=short"
test_run() { name=$1 limit=$2 n=$3; shift 3; FAIL_FILE=$OUT/fail_$name TIMES_FILE=/tmp/t_$name timeout -s INT -k 3 $limit pytest -n $n $P --record /tmp/r_$name.json "$@" > /tmp/$name.log 2>&1; echo "$name: $(tail -n 1 /tmp/$name.log | cut -c1-120) $(( $(date +%s) - START ))"; python3 $S/unfinished.py /tmp/t_$name | cut -c1-300; }
sed 's/ops.cases("models")\]/[]]/; s/\[("models", c, "bf16") for c in \[\]\]/[]/' $S/warm.py > $S/warm_norms.py; grep -n "^work" $S/warm_norms.py
N=7; for i in $(seq 0 $(( N - 1 ))); do timeout 75 python3 -W ignore $S/warm_norms.py $i $N > /tmp/warm_$i.log 2>&1 & WARM="$WARM $!"; done
test_run tests 75 8 -m gpu tests/test_norms_gpu.py tests/test_norms_odd_gpu.py tests/test_norms_quant.py tests/test_norms.py tests/test_candidate_attention_gpu.py
wait $WARM; t "tests and compiling"; cat /tmp/warm_*.log | grep -c "^warm"; find /tmp/inductor -name '*.best_config' -delete
timeout 120 python3 -W ignore -m benchmarks.run --op candidate_attention norms --out /tmp/bench > /tmp/bench.log 2>&1; t bench
for i in 0 1 2 3 4 5 6 7; do (timeout 100 compute-sanitizer --tool racecheck --print-limit 1000 python3 tests/sanitizer_workload.py norm/$i > /tmp/race_$i.log 2>&1; echo "race $i rc $? $(( $(date +%s) - START ))") & done
for w in norm_quant head_norm; do (timeout 100 compute-sanitizer --tool racecheck --print-limit 1000 python3 tests/sanitizer_workload.py $w > /tmp/race_$w.log 2>&1; echo "race $w rc $? $(( $(date +%s) - START ))") & done
test_run san 110 8 -m gpu_slow -k "(candidate_attention or norm) and not explained" tests/test_sanitizer.py
wait; t sanitizers
python3 - <<'P'
import glob
from tests import racecheck
found = {}
for f in glob.glob("/tmp/race_*.log"):
    text = open(f).read()
    for h in racecheck.hazards(text): found.setdefault(h, []).append(f[10:-4])
    if "RACECHECK SUMMARY" not in text: print("no summary:", f)
for h, fs in sorted(found.items()): print("HAZARD", h in racecheck.EXPLAINED, h, sorted(fs))
P
cd /tmp; tar czf $OUT/all.tgz --ignore-failed-read bench bench.log r_*.json race_*.log san.log tests.log warm_*.log t_* 2>/dev/null
for f in tests san; do cut -c1-250 $OUT/fail_$f 2>/dev/null | grep '^tests\|^E  ' | head -14; done
grep -v Warn /tmp/bench.log | grep "norms\|error" | cut -c1-100 | head -100
