# Each target is enough by itself on a machine with Python >= 3.10 and a C++ compiler:
#   make demo     trains a plain model, rewrites it, ranks movies with it
#   make test     tests the installed wheel
#   make wheel    dist/ikbo-*.whl
#   make bench    benchmarks, on a Hopper GPU
#   make lint     format, types
# PYTHON chooses the interpreter .venv is made from, MAX_JOBS the parallel compilations.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

SOURCES := setup.py pyproject.toml README.md LICENSE CMakeLists.txt \
  $(shell find cmake csrc) $(shell find python/ikbo -type f ! -name '*.so' ! -name '*.pyc')
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test wheel bench lint clean

demo: $(VENV)/installed $(VENV)/demo
	$(RUN) examples/rank_movies.py

test: $(VENV)/installed $(VENV)/test
	$(RUN) -m pytest --cov=ikbo --cov-report=term-missing:skip-covered --cov-fail-under=95

wheel: $(VENV)/wheel
	@ls dist/*.whl

bench: $(VENV)/installed
	$(RUN) -m cmake -S . -B build/cmake -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(RUN)
	$(RUN) -m cmake --build build/cmake --target ikbo_device_tests  # holds the plain GEMM
	$(RUN) benchmarks/run.py

lint: $(VENV)/build $(VENV)/lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

clean:
	rm -rf build dist $(VENV)

# ---- stamps: one file a finished step, redone when what it came from changes -------------------
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'ikbo: expected Python >= 3.10, got $(PYTHON). To fix: make PYTHON=python3.11 ...'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/build: requirements/build.txt requirements/nvcc.txt $(VENV)/created
	$(PIP) -r requirements/build.txt
	@if [ -z "$$CUDACXX$$CUDA_HOME" ] && \
	   ! PATH="$$PATH:/usr/local/cuda/bin" nvcc --version 2>&1 | grep -q 'release 1[3-9]'; then \
	  echo 'no nvcc >= 13 on this machine: taking it from PyPI' && $(PIP) -r requirements/nvcc.txt; fi
	@touch $@

$(VENV)/test $(VENV)/lint: $(VENV)/%: requirements/%.txt $(VENV)/created
	$(PIP) -r $<
	@touch $@

$(VENV)/demo: requirements/demo.txt $(VENV)/created
	$(PIP) --no-deps -r $<
	@touch $@

$(VENV)/wheel: $(SOURCES) $(VENV)/build
	rm -rf build/lib.* build/bdist.* build/wheel dist
	$(RUN) -m pip wheel --verbose --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(RUN) -m auditwheel repair --exclude 'libtorch*' --wheel-dir dist build/wheel/*.whl
	@touch $@

$(VENV)/installed: $(VENV)/wheel
	$(PIP) --force-reinstall --no-deps dist/*.whl
	@touch $@
