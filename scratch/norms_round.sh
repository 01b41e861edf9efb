# tests and records of the norms
START=$(date +%s); t() { echo "== $1 $(( $(date +%s) - START )) s"; }
ROOT=$PWD; S=$ROOT/build/scratch; I="python3 -m pip install -q --no-index --no-deps --no-compile"
$I --target /tmp/site build/wheel312/*.whl; mv python /tmp/python_away$RANDOM
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONHASHSEED=0 PATH=$PATH:/usr/local/cuda/bin IKBO_COMMIT=$(cat build/commit) IKBO_DEVICE_TESTS=$ROOT/build/cmake/libikbo_device_tests.so PYTHONPATH=/tmp/site:$S:$ROOT
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/inductor/triton
tar xzf $S/inductor.tgz -C /tmp
P="-q -p no:cacheprovider -p no:logging -p conftest_fail -W ignore --dist worksteal --tb=short"
test_run() { name=$1 limit=$2 n=$3; shift 3; FAIL_FILE=$OUT/fail_$name TIMES_FILE=/tmp/t_$name timeout -s INT -k 3 $limit pytest -n $n $P --record /tmp/r_$name.json "$@" > /tmp/$name.log 2>&1; echo "$name: $(tail -n 1 /tmp/$name.log | cut -c1-120) $(( $(date +%s) - START ))"; python3 $S/unfinished.py /tmp/t_$name | cut -c1-300; }
find /tmp/inductor -name '*.best_config' -delete; t tests
timeout 120 python3 -W ignore -m benchmarks.run --op norms --out /tmp/bench > /tmp/bench.log 2>&1; t bench
left=$(( 332 - ( $(date +%s) - START ) )); echo "left $left"
export TMPDIR=/tmp
(test_run tests 150 3 -m gpu tests/test_norms_gpu.py tests/test_norms_odd_gpu.py tests/test_norms_quant.py tests/test_norms.py) &
(test_run sync $left 3 -m gpu_slow -k "synccheck and norm" tests/test_sanitizer.py) &
test_run race $left 10 -m gpu_slow -k "norm and not synccheck" "tests/test_sanitizer.py::test_every_hazard_is_explained" "tests/test_sanitizer.py::test_kernels_are_clean"
wait; t sanitizers
cd /tmp; tar czf $OUT/all.tgz --ignore-failed-read bench bench.log r_*.json tests.log race.log sync.log warm_*.log t_* 2>/dev/null
for f in tests race sync; do cut -c1-250 $OUT/fail_$f 2>/dev/null | grep '^tests\|^E  ' | head -14; done
python3 - <<'P'
import json
from collections import defaultdict
d = json.load(open("/tmp/bench/norms.json")); c = defaultdict(dict)
for r in d["rows"]: c[r["case"], r["dtype"]][r["impl"]] = r
for k, v in c.items(): print(f"{k[0]:24} {k[1]} {v['ikbo'].get('us')} copy {v['copy'].get('ratio')} compile {v['compile'].get('ratio')} eager {v['eager'].get('ratio')}" + ("  <<<" if (v["compile"].get("ratio") or 9) < 1 else ""), [r.get("error") for r in v.values() if r.get("error")] or "")
P
