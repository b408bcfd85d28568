# Everything below works on a fresh clone: what is missing is set up first, in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := compile
.PHONY: help setup opencl compile check test docs fuzz lint style types bench bench-cpu suite harvest-bundles clean

VENV := .venv
# pyproject.toml is the only input of the environment; the stamp is older than it when it changed.
STAMP := $(VENV)/.setup

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DEBIAN_FRONTEND := noninteractive

STYLE := $(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/lint-imports
# A process per core; one that is done takes over half of what another has left.
PYTEST := $(VENV)/bin/pytest -q -n logical --maxprocesses 8 --dist worksteal

# as_root COMMAND...: fails without a word where neither root nor a sudo without password is at hand.
define AS_ROOT
as_root() {
  if [ "$$(id -u)" = 0 ]; then "$$@"; elif sudo -n true 2>/dev/null; then sudo -n "$$@"; else return 1; fi
}
apt_install() {
  command -v apt-get >/dev/null && as_root apt-get update -qq && as_root apt-get install -y -qq --no-install-recommends "$$@"
}
endef

# A name on PATH need not be a working Python (pyenv's shims), so every candidate is tried out.
define FIND_PYTHON
find_python() {
  for candidate in python3.12 python3.11 python3 /usr/bin/python3.12 /usr/bin/python3.11 /usr/bin/python3; do
    if "$$candidate" -c "import sys, venv$$1; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))" 2>/dev/null; then
      echo "$$candidate"; return
    fi
  done
}
endef

## help: what can be made
help:
	@sed -n 's/^## \([a-z-]*\): \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 17

## setup: the environment in .venv; does nothing when it is up to date
setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(AS_ROOT)
	$(FIND_PYTHON)
	if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then
	  python=$$(find_python ", ensurepip")
	  if [ -z "$$python" ]; then
	    apt_install python3 python3-venv >/dev/null || true
	    python=$$(find_python ", ensurepip")
	  fi
	  if [ -z "$$python" ]; then
	    echo "make setup: needs Python 3.11 or 3.12 with venv (Debian: apt-get install python3 python3-venv)" >&2
	    exit 1
	  fi
	  "$$python" -m venv --clear $(VENV)
	fi
	echo "make setup: installing into $(VENV), about a minute" >&2
	$(VENV)/bin/python -m pip install -qq -e '.[dev]'
	touch $(STAMP)

## opencl: what runs kernels here to verify them, g++ and an OpenCL device; says in a line what cannot be had
opencl: $(STAMP)
	@$(AS_ROOT)
	if ! command -v g++ >/dev/null; then
	  apt_install g++ >/dev/null || echo "make opencl: there is no g++; races of kernels will not be seen" >&2
	fi
	reason() { $(VENV)/bin/python -c 'from codegen.verify.opencl import opencl_available as a; print(a() or "")'; }
	if [ -n "$$(reason)" ]; then
	  apt_install pocl-opencl-icd >/dev/null || true
	  why=$$(reason)
	  if [ -n "$$why" ]; then echo "make opencl: $$why; without it and g++ kernels are compiled but not verified" >&2; fi
	fi

## compile: the example convolution for a V100, its best kernel verified
compile: $(STAMP) opencl
	@$(VENV)/bin/roller compile examples/conv2d.json --device v100

## check: what takes a minute: style, types, layers, and every quick test that needs no compiler, OpenCL or PyTorch
check: $(STAMP)
	@$(VENV)/bin/mypy & types=$$!
	$(STYLE) || { kill $$types; exit 1; }
	$(PYTEST) --no-tools || { wait $$types || true; exit 1; }
	wait $$types

## test: the tests, kernels run on the CPU included
test: $(STAMP) opencl
	@$(PYTEST)

## docs: the documentation as a site in out/site; no dead link, no page without a way to it
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

## fuzz: MINUTES=n (10) of drawn operators, run as kernels of every kind; goes on where the last run of a SEED=s (0) ended
# OF=tests has every test that draws draw anew instead, and prints the SEED=s that repeats it.
fuzz: $(STAMP) opencl
	@$(VENV)/bin/python -m $(if $(filter tests,$(OF)),tests,bench).fuzz --minutes $(or $(MINUTES),10) \
		$(if $(SEED),--seed $(SEED))

## lint: style, types and the order of the layers
lint: style types

## style: what takes seconds of lint: style and the order of the layers
style: $(STAMP)
	@$(STYLE)

## types: what takes minutes of it
types: $(STAMP)
	@$(VENV)/bin/mypy

## bench: how long construction and compilation take here
bench: $(STAMP) opencl
	@$(VENV)/bin/pytest -q bench/ --benchmark-columns=min,median,max,rounds --benchmark-time-unit=ms --benchmark-sort=name

## bench-cpu: our kernels against OpenBLAS, oneDNN and MetaSchedule's schedules on this machine's cores
bench-cpu: $(STAMP)
	@$(VENV)/bin/roller compile bench/cpu/cpu24.json --device cpu --top-k 50 --out out/cpu24
	@$(VENV)/bin/roller profile out/cpu24 --top-k 10
	@$(VENV)/bin/roller profile out/cpu24
	@$(VENV)/bin/python -m bench.cpu

## suite: the thesis's 119 operators for a V100, in out/roller119
suite: $(STAMP)
	@$(VENV)/bin/roller compile bench/suites/roller119.json --device v100 --out out/roller119

## harvest-bundles: kernels that bench/gpu/harvest.py takes to a GPU machine, in out/harvest-bundles, and all of it in one file
harvest-bundles: $(STAMP)
	@$(VENV)/bin/python bench/gpu/prepare.py --device h200 --one-file out/harvest-h200.pyz

## clean: all of this gone
clean:
	@rm -rf $(VENV) out build *.egg-info .mypy_cache .pytest_cache .test-cache .ruff_cache .import_linter_cache .benchmarks .hypothesis
