# Norms: tests (45 s at most), times (22 s at most), then the sanitizer's part (65 s at most, SAN=0 leaves it out).
# In the directory that holds tests and build/scratch; the wheel in SITE. Logs under $OUT.
START=$(date +%s); t() { echo "-- $(( $(date +%s) - START )) s"; }
OUT=${OUT:-/tmp}; export PYTHONPATH=${SITE:+$SITE:}$PWD/build/scratch:$PYTHONPATH OMP_NUM_THREADS=1 COLUMNS=180 PATH=$PATH:/usr/local/cuda/bin
P="-q -p no:cacheprovider -p no:logging -p conftest_fail -W ignore --dist worksteal --tb=short"
FAIL_FILE=$OUT/norms.failures.txt TIMES_FILE=$OUT/norms.times.txt timeout -s INT -k 3 45 python3 -m pytest -m gpu -n 10 $P tests/test_norms_gpu.py tests/test_norms_quant.py tests/test_norms.py > $OUT/norms.tests.log 2>&1
grep -E "^(FAILED|ERROR)" $OUT/norms.tests.log | cut -c1-160 | head -8; tail -n 1 $OUT/norms.tests.log; t
timeout -k 2 25 python3 build/scratch/both.py 22 > $OUT/norms.both.log 2> $OUT/norms.both.err
grep -vE " ok +x(0.9[89]|1.0[01])" $OUT/norms.both.log | cut -c1-100 | head -60; tail -n 2 $OUT/norms.both.err | cut -c1-200; t
if [ "${SAN:-1}" = 1 ]; then
FAIL_FILE=$OUT/norms.san_failures.txt TIMES_FILE=$OUT/norms.san_times.txt timeout -s INT -k 3 62 python3 -m pytest -m gpu_slow -k norm -n 9 $P tests/test_sanitizer.py > $OUT/norms.san.log 2>&1
tail -n 1 $OUT/norms.san.log; cut -c1-120 $OUT/norms.san_times.txt | grep -v start | tail -n 9; grep -E "ikbo::|Error|=====" $OUT/norms.san_failures.txt | cut -c1-170 | head -10; t
fi
