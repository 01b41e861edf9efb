import sys
started, done = {}, set()
for line in open(sys.argv[1]):
    t, kind, rest = line.rstrip('\n').split(' ', 2)
    if kind == 'start': started[rest] = t
    else: done.add(rest.split(' ', 1)[1])
print(len(done), 'done; unfinished:', [n for n in started if n not in done][:20])
