START=$(date +%s); t() { echo "== $1 $(( $(date +%s) - START )) s"; }
ROOT=$PWD; S=$ROOT/build/scratch; I="python3 -m pip install -q --no-index --no-deps --no-compile"
$I --target /tmp/site build/wheel312/*.whl; mv python /tmp/python_away$RANDOM
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONHASHSEED=0 IKBO_COMMIT=$(cat build/commit) IKBO_DEVICE_TESTS=$ROOT/build/cmake/libikbo_device_tests.so PYTHONPATH=/tmp/site:$S:$ROOT
P="-p no:cacheprovider -p no:logging -p conftest_fail -W ignore --dist worksteal"
test_run() { name=$1 limit=$2 n=$3; shift 3; FAIL_FILE=/tmp/fail_$name TIMES_FILE=/tmp/t_$name timeout -s INT -k 3 $limit pytest -q -n $n $P --record /tmp/r_$name.json "$@" > /tmp/$name.log 2>&1; echo "$name: $(tail -n 1 /tmp/$name.log | cut -c1-120) $(( $(date +%s) - START ))"; python3 $S/unfinished.py /tmp/t_$name | cut -c1-300; }
(TORCHINDUCTOR_CACHE_DIR=/tmp/ind_aoti timeout -s INT -k 3 270 pytest -q -n 2 $P -m gpu -k "package and (dlrm or target)" tests/test_rewrite_gpu.py > /tmp/aoti.log 2>&1; echo "aoti: $(tail -n 1 /tmp/aoti.log | cut -c1-150) $(( $(date +%s) - START ))") &
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/inductor/triton
N=8; for i in $(seq 0 $(( N - 1 ))); do timeout 100 python3 -W ignore $S/warm.py $i $N > /tmp/warm_$i.log 2>&1 & WARM="$WARM $!"; done
test_run one 90 5 -m gpu tests/test_linear_compression_gpu.py tests/test_device.py tests/test_gemm.py tests/test_concat_linear_gpu.py tests/test_linear_compression.py tests/test_packed_weights.py & T1=$!
test_run two 95 6 -m gpu tests/test_norms_gpu.py tests/test_norms_quant.py tests/test_norms.py tests/test_candidate_attention_gpu.py tests/test_gated_gpu.py tests/test_gated_training_gpu.py tests/test_gated_tiles.py tests/test_weight_stream.py tests/test_gated_grad.py tests/test_gated.py & T2=$!
wait $T1 $T2 $WARM; t "tests and compiling"; cat /tmp/warm_*.log | grep -c "^warm"; find /tmp/inductor -name '*.best_config' -delete
timeout $(( 252 - ($(date +%s) - START) )) python3 -W ignore -m benchmarks.run --op candidate_attention gated_mlp tower norms models --out /tmp/bench > /tmp/bench.log 2>&1; t bench
test_run traps 36 3 -m gpu_slow tests/test_device_traps.py
cd /tmp; tar czf $OUT/all.tgz --ignore-failed-read bench bench.log r_*.json traps.log fail_* one.log two.log aoti.log warm_*.log 2>/dev/null
for f in one two; do cut -c1-250 /tmp/fail_$f 2>/dev/null | grep '^tests\|^E  ' | head -12; done
grep -v Warn /tmp/bench.log | grep -v fp16 | cut -c1-110 | head -130; sleep 1; cat /tmp/aoti.log | tail -4 | cut -c1-200
