# One environment, made once. `make demo` trains a model beyond its budget; `make test` tries every feature once,
# `make test-all` over all cases.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal
SLICE ?= 1/1

.PHONY: demo test test-all test-slow durations rehearsal gpu-carried simulated simulated-part simulated-all simulated-newest test-newest release docs check format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[triton,transformers,plots,dev]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(PYTEST) -m 'not slow and not nightly'

test-all: $(READY)
	$(PYTEST)

# What each test of `make test` takes, into a committed file: compare it with the last one to see what has grown.
durations: $(READY)
	$(PYTEST) -m 'not slow and not nightly' --cpu --cpu-record tests/cpu_seconds.tsv

test-slow: $(READY)
	$(PYTEST) -m slow --slice $(SLICE)

# A CUDA build of torch without NVIDIA's libraries: tests/simulated stands in for these. It takes 2 GB. The versions are
# the oldest that are supported, and those of the machine with a GPU on which benchmarks/gpu runs.
CUDA := .venv-cuda
CUDA_PYTHON := $(or $(shell python3.12 -c 'import sys; print(sys.executable)' 2> /dev/null), \
	$(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12)),$(PYTHON))
TORCH := 2.11.0
TRITON := 3.6.0
BESIDE := transformers==5.17.0 huggingface_hub==1.33.0 numpy==2.5.2
$(CUDA)/.ready: Makefile constraints.txt tests/simulated/build.py $(wildcard tests/simulated/runtime/*)
	$(CUDA_PYTHON) -m venv --clear $(CUDA)
	$(CUDA)/bin/pip install --quiet --disable-pip-version-check --no-deps torch==$(TORCH) \
		triton==$(TRITON) accelerate==1.15.0 peft==0.21.2
	grep --invert-match --extended-regexp '^(torch|triton|transformers|huggingface_hub|numpy)==' constraints.txt \
		> $(CUDA)/constraints.txt
	$(CUDA)/bin/pip install --quiet --disable-pip-version-check --constraint $(CUDA)/constraints.txt setuptools \
		filelock typing-extensions sympy networkx jinja2 fsspec safetensors pytest pytest-xdist hypothesis psutil $(BESIDE)
	$(CUDA)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(CUDA)/bin/pip install --quiet --disable-pip-version-check --no-deps --target $(CUDA)/headers \
		nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88
	$(PYTHON) tests/simulated/build.py $(CUDA) $(CUDA)/headers $(CUDA)/cudasim
	touch $@

# test_pages.py looks at an allocator that no test before it has taken from, test_ranks.py forks from a process that
# has several devices. CI runs the rest, in three minutes.
SIMULATED := LD_LIBRARY_PATH=$(CUDA)/cudasim OMP_NUM_THREADS=1 $(CUDA)/bin/python -m pytest
ALONE := tests/simulated/test_pages.py tests/simulated/test_ranks.py
simulated: simulated-part
	$(SIMULATED) $(ALONE) -m 'not slow and not nightly'

simulated-part: $(CUDA)/.ready
	$(SIMULATED) --numprocesses 2 --dist loadfile tests/simulated $(addprefix --ignore ,$(ALONE)) \
		-m 'not slow and not nightly'

simulated-all: simulated
	$(SIMULATED) --numprocesses 2 --dist worksteal tests/simulated -m 'slow or nightly'

# What runs on a machine with a GPU (docs/gpu.md), in small; and the kernels that it starts from, compiled ahead.
rehearsal: $(CUDA)/.ready
	LD_LIBRARY_PATH=$(CURDIR)/$(CUDA)/cudasim OMP_NUM_THREADS=1 $(CUDA)/bin/python -m tests.simulated.rehearsal

gpu-carried: $(CUDA)/.ready
	CUDASIM_TOTAL=85520809984 CUDASIM_POISON=0 LD_LIBRARY_PATH=$(CURDIR)/$(CUDA)/cudasim $(CUDA)/bin/python -m benchmarks.gpu.carry

# The oldest torch that is supported runs there. The newest one, and on it `make test`, as where there is no GPU:
NEWEST := .venv-newest
NEWER := CUDA=$(NEWEST) TORCH=2.15.0 TRITON=3.9.0 CUDA_PYTHON=$(PYTHON) \
	BESIDE='transformers==5.23.0 huggingface_hub==2.4.0 numpy==2.4.6'
simulated-newest:
	$(MAKE) simulated $(NEWER)

test-newest: $(READY)
	$(MAKE) $(NEWEST)/.ready $(NEWER)
	$(BIN)/pip freeze --exclude-editable --exclude torch --exclude triton > $(NEWEST)/packages.txt
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $(NEWEST)/packages.txt
	CUDASIM_DEVICES=0 LD_LIBRARY_PATH=$(NEWEST)/cudasim $(NEWEST)/bin/python -m pytest \
		--numprocesses 2 --dist worksteal --ignore tests/simulated -m 'not slow and not nightly'

# A wheel and a source distribution, their metadata checked. The wheel is tried in an environment of its own, and with
# the oldest and the newest packages.
RELEASE := .venv-release
release: $(READY) $(CUDA)/.ready
	$(MAKE) $(NEWEST)/.ready $(NEWER)
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6.1'
	rm -rf dist
	$(RELEASE)/bin/python -m build --outdir dist .
	$(RELEASE)/bin/twine check --strict dist/*
	$(PYTHON) -m tests.support.release dist/*.whl
	CUDASIM_DEVICES=0 LD_LIBRARY_PATH=$(CURDIR)/$(CUDA)/cudasim $(PYTHON) -m tests.support.release dist/*.whl \
		--beside $(CUDA)/bin/python
	CUDASIM_DEVICES=0 LD_LIBRARY_PATH=$(CURDIR)/$(NEWEST)/cudasim $(PYTHON) -m tests.support.release dist/*.whl \
		--beside $(NEWEST)/bin/python

# The documentation as a site, in build/site: an environment of its own, as nothing else needs a site's tools.
docs:
	test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/pip install --quiet \
		--disable-pip-version-check --constraint constraints.txt 'mkdocs-material>=9.5'; }
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf build/typecheck build/lib
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p megacompile
	cd build/typecheck && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-logo

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(CUDA) .venv-docs build *.egg-info runs
