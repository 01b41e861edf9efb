#!/bin/bash
# short.sh SITE OUT: SITE holds the installed ikbo of the branch. At most 25 s. Result: OUT/short.log, a short table.
HERE=$(cd $(dirname $0); pwd); SITE=$1; OUT=$2; W=$(mktemp -d)
for n in base scratch; do mkdir -p $W/$n; cp -r $SITE/ikbo $W/$n/; python3 -c "import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], 'wb'))" $HERE/lib_$n.so.xz $W/$n/ikbo/libikbo.so; done
bench() { PYTHONPATH=$1 timeout 20 python3 $HERE/attn_bench.py --rounds 5 --cases "$2" "${@:3}" 2>&1 | grep -E "^L|^one|^jag|WRONG|Error"; }
{
echo "== before: clusters"; bench $W/base '_s1_|one_|_s8_' --skip-sdpa
echo "== now"; bench $SITE '_s1_|one_|_s8_'
echo "== now, jagged"; bench $SITE 'L512|jag' --skip-sdpa
echo "== choices, phases"; PYTHONPATH=$W/scratch:$HERE timeout 20 python3 $HERE/short.py 2>&1 | tail -20
} > $OUT/short.log 2>&1
cat $OUT/short.log
