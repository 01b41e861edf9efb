#!/bin/bash
# short.sh SITE OUT [BASE]: SITE holds the branch's installed ikbo, BASE main's (for "before"). About 30 s. Result: OUT/finder.log.
HERE=$(cd $(dirname $0); pwd); SITE=$1; OUT=$2; BASE=$3; W=$(mktemp -d)
mkdir -p $W/scratch; cp -r $SITE/ikbo $W/scratch/
python3 -c "import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], 'wb'))" $HERE/lib_scratch.so.xz $W/scratch/ikbo/libikbo.so
bench() { PYTHONPATH=$1 timeout 25 python3 $HERE/attn_bench.py --rounds 5 --cases "$2" "${@:3}" 2>&1 | grep -E "^L|^one|^jag|^D|WRONG|Error"; }
{
if [ -n "$BASE" ]; then echo "== before"; bench $BASE '_s1_|one_|_s8_|L512|D64|D256' --skip-sdpa; fi
echo "== now"; bench $SITE '_s1_|one_|_s8_'
echo "== now, longer ones (must not lose)"; bench $SITE 'L512|D64|D256|jag' --skip-sdpa
echo "== choices, phases"; PYTHONPATH=$W/scratch:$HERE timeout 40 python3 $HERE/short.py 2>&1 | tail -20
} > $OUT/finder.log 2>&1
cat $OUT/finder.log
