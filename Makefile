# The two commands for a fresh machine: `make train` and `make test`. Everything goes into .venv.
#
#   PYTHON=python3.12              the interpreter the environment is made from (3.10 or newer)
#   ZSHARD_TORCH='torch==2.14.1'   another torch than the pinned one; read when the environment is made
#   ARGS='--steps 20'              arguments of `zshard train`, or of pytest in the place of `tests`
# cmake/toolchain.py lists the switches of the build itself.

PYTHON ?= python3
TORCH := $(or $(ZSHARD_TORCH),torch==2.13.0)
ARGS ?=

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# One stamp per torch asked for, so that another ZSHARD_TORCH is not taken for done.
TORCH_STAMP := $(VENV)/.torch-$(firstword $(shell printf %s '$(TORCH)' | cksum))
BUILT := $(VENV)/.built
LINTERS := $(VENV)/.linters
# With the folders, whose dates tell that a file has gone.
SOURCES := $(shell find csrc) $(wildcard cmake/*.py) setup.py pyproject.toml
CPP_SOURCES = $(shell find csrc cmake tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PYTHON_SOURCES := setup.py cmake zshard tests benchmarks

.PHONY: train test build lint format check-headers check-wheel clean

train: $(BUILT)
	$(VENV)/bin/zshard train $(ARGS)

# Ranks and commands start by the thousand; where Python kept no bytecode, each would compile anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(BUILT)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal --durations 20 $(or $(ARGS),tests)

build: $(BUILT)

$(TORCH_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "set PYTHON to 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install '$(TORCH)' 'setuptools>=77'
	rm -f $(VENV)/.torch-* && touch $@

$(BUILT): $(TORCH_STAMP) $(SOURCES)
	$(PIP) install --no-build-isolation -e '.[test]'
	touch $@

$(LINTERS): $(BUILT) pyproject.toml
	$(PIP) install --no-build-isolation -e '.[lint]'
	touch $@

lint: $(LINTERS)
	$(VENV)/bin/ruff check $(PYTHON_SOURCES)
	$(VENV)/bin/ruff format --check $(PYTHON_SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)

format: $(LINTERS)
	$(VENV)/bin/ruff check --fix $(PYTHON_SOURCES)
	$(VENV)/bin/ruff format $(PYTHON_SOURCES)
	$(VENV)/bin/clang-format -i $(CPP_SOURCES)

# Host tests of the headers that CPU and CUDA share and of the kernels, under ASan and UBSan.
check-headers:
	cmake -S cmake -B build/host $(if $(wildcard $(VENV)/bin/python),-DPython_EXECUTABLE="$$PWD/$(VENV)/bin/python")
	cmake --build build/host --parallel $(shell nproc)
	ctest --test-dir build/host --output-on-failure

# One wheel under three releases of torch; downloads CUDA builds of torch, so on demand only.
check-wheel:
	$(PYTHON) tests/check_one_wheel.py

clean:
	rm -rf build zshard.egg-info zshard/_C.*.so $(BUILT)
