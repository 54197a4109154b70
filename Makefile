# The two commands for a fresh machine: `make train` and `make test`. Everything goes into .venv.
#
#   PYTHON=python3.12              the interpreter the environment is made from (3.10 or newer)
#   ZSHARD_TORCH='torch==2.14.1'   another torch than the pinned one; read when the environment is made
#   ARGS='--steps 20'              further arguments for `zshard train`, or for pytest
# setup.py lists the switches of the build itself.

PYTHON ?= python3
TORCH := $(or $(ZSHARD_TORCH),torch==2.13.0)
ARGS ?=

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# One stamp per torch asked for, so that another ZSHARD_TORCH is not taken for done.
TORCH_STAMP := $(VENV)/.torch-$(firstword $(shell printf %s '$(TORCH)' | cksum))
BUILT := $(VENV)/.built
# The headers' paths of this torch go into compile_commands.json.
VENV_PYTHON = $(patsubst %,-DPython_EXECUTABLE=%,$(abspath $(wildcard $(VENV)/bin/python)))
LINTERS := $(VENV)/.linters
SOURCES := $(shell find csrc cmake -name '*.*') setup.py pyproject.toml
CPP_SOURCES = $(shell find csrc cmake -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PYTHON_SOURCES := setup.py cmake zshard tests benchmarks

.PHONY: train test build lint format check-headers check-wheel clean

train: $(BUILT)
	$(VENV)/bin/zshard train $(ARGS)

test: $(BUILT)
	$(VENV)/bin/python -m pytest tests $(ARGS)

build: $(BUILT)

$(TORCH_STAMP):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "zshard needs Python 3.10 or newer; set PYTHON")'
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

# Host tests of the headers that CPU and CUDA share, under ASan and UBSan.
check-headers:
	cmake -S cmake -B build/host $(VENV_PYTHON)
	cmake --build build/host
	ctest --test-dir build/host --output-on-failure

# One wheel under two releases of torch; downloads a CUDA build of torch, so on demand only.
check-wheel:
	$(PYTHON) tests/check_one_wheel.py

clean:
	rm -rf build zshard.egg-info zshard/_C.*.so $(BUILT)
