import os, time
def _log(text):
    with open(os.environ.get('TIMES_FILE', '/tmp/times.txt'), 'a') as f:
        f.write(text)
if 'PYTEST_XDIST_WORKER' not in os.environ:
    def pytest_runtest_logstart(nodeid, location):
        _log(f"{time.time():.1f} start {nodeid}\n")
    def pytest_runtest_logreport(report):
        if report.when == 'call' or report.failed:
            _log(f"{time.time():.1f} {report.duration:.2f} {report.outcome} {report.nodeid}\n")
        if report.failed:
            with open(os.environ.get('FAIL_FILE', '/tmp/failures.txt'), 'a') as f:
                f.write(f"{report.nodeid} {report.when}\n{str(report.longrepr)[-1500:]}\n----\n")
