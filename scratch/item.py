"""item.py NAME FIRST STEP: every STEP-th work of that name, from FIRST on."""
import sys
import torch, ikbo
from tests.sanitizer_workload import WORK
name, first, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
work = [w for w in WORK if w[0].__name__ == name]
for function, arguments in work[first::step]:
    print("ITEM", function.__name__, arguments, flush=True)
    with ikbo.strict():
        function(*arguments)
        torch.cuda.synchronize()
print("DONE", flush=True)
