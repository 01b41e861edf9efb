# The first GPU round to come: the record of linear compression's files, then what is cheap to know.
START=$(date +%s); t() { echo $(( $(date +%s) - START )); }
ROOT=$PWD; S=$ROOT/build/scratch; I="python3 -m pip install -q --no-index --no-deps --no-compile"
$I --target /tmp/site build/wheel312/*.whl
mv python /tmp/python_away$RANDOM
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 IKBO_COMMIT=$(cat build/commit) IKBO_DEVICE_TESTS=$ROOT/build/cmake/libikbo_device_tests.so PYTHONPATH=/tmp/site:$S
P="-p no:cacheprovider -p no:logging -p conftest_fail -W ignore --dist worksteal"
FAIL_FILE=$OUT/failures.txt TIMES_FILE=/tmp/t timeout -s INT -k 3 90 pytest -q -n 12 $P --record $OUT/tests.json -m gpu tests/test_linear_compression_gpu.py tests/test_device.py tests/test_gemm.py tests/test_concat_linear_gpu.py tests/test_linear_compression.py tests/test_packed_weights.py > $OUT/one.log 2>&1; tail -n 1 $OUT/one.log; python3 $S/unfinished.py /tmp/t; t
timeout 20 python3 $S/flush_test.py; t
timeout 60 python3 -X faulthandler - <<'PY' 2>&1 | tail -30
import torch
m = torch.nn.Linear(8, 8).cuda().eval()
with torch.no_grad():
    e = torch.export.export(m, (torch.randn(4, 8, device="cuda"),))
    p = torch._inductor.aoti_compile_and_package(e, package_path="/tmp/plain.pt2")
    print("plain package:", torch._inductor.aoti_load_package(p)(torch.randn(4, 8, device="cuda")).shape)
PY
t
