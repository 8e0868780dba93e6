# Millrace on a bare machine: `make up` serves, `make test` tests. `make help` lists the rest.
# Everything is installed into .venv, from locked and hashed requirements; a second call installs nothing.

VENV ?= .venv
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; print("$(name)" if (3, 11) <= sys.version_info < (3, 15) else "")' 2>/dev/null)))
BIN := $(VENV)/bin
# Where this variable is set, as in many containers, each process would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# One process more than cores: these tests often wait, for processes to start and for timers.
test test-all test-faults test-faults-quick: JOBS = $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 1)))

# make up PORT=8001 DATA_DIR=/data/millrace
ifdef PORT
export MILLRACE_PORT := $(PORT)
endif
ifdef DATA_DIR
export MILLRACE_DATA_DIR := $(DATA_DIR)
endif

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help up setup test test-all test-unit test-ledger test-browser test-faults test-browser-quick test-faults-quick \
	test-clients test-clients-quick test-peers test-models test-emulation bench-quick bench-cpu \
	first-kernels generated lint types lint-imports check docs docs-openapi api-diff messages screenshots release lock lock-platforms clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo '  options: PORT=8001, DATA_DIR=/data/millrace, PYTHON=python3.12; ARGS="…" for up and the tests'
	@echo '  of setup: TORCH_INDEX=URL takes PyTorch from this package index; INSTALLER=pip does without uv'

# The C kernels need only a compiler and Python's standard library, so their first build runs during the installation.
up: $(if $(wildcard $(VENV)/installed),,first-kernels) setup ## start everything on this machine; Ctrl-C stops it (PORT=, DATA_DIR=)
	@exec $(BIN)/millrace up $(ARGS)

first-kernels:
	@$(PYTHON) -m kernels.native.build >/dev/null 2>&1 &

setup: generated ## install what `make up` needs, and build the files that are not in git

# The client of the management API and the translations: built when what they are generated from has changed.
generated: $(VENV)/installed
	@$(BIN)/python -m tools.build_files

test test-all test-unit test-ledger test-browser test-faults test-browser-quick test-faults-quick test-clients test-clients-quick \
	test-peers test-models test-emulation types lint-imports: generated

# A file's tests share what they look at, so they go to one process. The longest files come first, so that the processes
# end at about the same time. Of several -m the last counts: ARGS="-m slow".
# A suite's directories are left out if ARGS names some.
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=25
TESTS = $(if $(filter tests/%,$(ARGS)),,$(1))

# Named files run with all their cases.
test: $(VENV)/installed-dev ## run the tests without browser, faults and clients (ARGS="tests/integration/gateway -k name")
	@exec $(PYTEST) $(call TESTS,tests/e2e tests/integration tests/unit $(SHORT)) $(ARGS)

test-all: $(VENV)/installed-dev ## run `test` with the cases that it leaves out, such as further roles and values
	@exec $(PYTEST) $(call TESTS,tests/e2e tests/integration tests/unit) $(ARGS)

test-unit: $(VENV)/installed-dev ## run the tests that need no service, model or browser
	@exec $(PYTEST) $(call TESTS,tests/unit) $(ARGS)

test-ledger: $(VENV)/installed-dev ## run 400 random histories of invoices, payments and corrections, and 400 of months; `make test` runs a few
	@exec $(PYTEST) --dist load -m slow $(call TESTS,$(addprefix tests/integration/billing/test_,ledger_properties.py month_properties.py)) $(ARGS)

test-browser: $(VENV)/installed-dev ## run the tests of the console in a real browser; needs Chromium
	@exec $(PYTEST) $(call TESTS,tests/browser) --browser-must-run $(ARGS)

test-faults: $(VENV)/installed-dev ## run the tests that kill processes and break connections
	@exec $(PYTEST) $(call TESTS,tests/faults) $(ARGS)

# The short forms, which .ci/run uses: each screen and each type of fault once.
test test-browser-quick test-faults-quick: SHORT = -m "not extended"

test-browser-quick: $(VENV)/installed-dev ## run test-browser with each screen in one state
	@exec $(PYTEST) $(call TESTS,tests/browser) --browser-must-run $(SHORT) $(ARGS)

test-faults-quick: $(VENV)/installed-dev ## run test-faults with one case of each type of fault
	@exec $(PYTEST) $(call TESTS,tests/faults) $(SHORT) $(ARGS)

test-clients: $(VENV)/installed-dev ## run every client of docs/reference/clients.md (ARGS="-k litellm")
	@exec $(BIN)/python -m pytest $(call TESTS,tests/clients) $(ARGS)

test-clients-quick: $(VENV)/installed-dev ## run the openai, anthropic, LangChain, LiteLLM, AI SDK and Java clients
	@exec $(BIN)/python -m pytest $(call TESTS,tests/clients) -m "not extended" $(ARGS)

test-peers: $(VENV)/installed-dev ## run LiteLLM, llama.cpp and vLLM behind Millrace; tests/peers names their variables (ARGS="-k vllm")
	@exec $(BIN)/python -m pytest $(call TESTS,tests/peers) $(ARGS)

test-models: $(VENV)/installed-dev ## run published GGUF files; MILLRACE_TEST_MODELS names their directory
	@exec $(BIN)/python -m pytest -p no:xdist --durations=10 $(call TESTS,tests/models) $(ARGS)

test-emulation: $(VENV)/installed-dev ## run the C kernels for AVX2 and ARM in an emulator; needs qemu-user and gcc-aarch64-linux-gnu
	@exec $(BIN)/python -m pytest -p no:xdist $(call TESTS,tests/emulation) $(ARGS)

bench-quick: setup ## run every benchmark for a few seconds, to see that it works (ARGS="serve gateway")
	@PYTHONPATH=.:platform exec $(BIN)/python -m benchmarks.run_quick $(ARGS)

bench-cpu: setup ## measure the CPU backend beside OpenVINO, llama.cpp and vLLM, which it installs into build/peers (ARGS="--sections engine")
	@PYTHONPATH=.:platform exec $(BIN)/python -m benchmarks.cpu --install --models build/peers/models \
		--out benchmarks/results $(ARGS)

lint: $(VENV)/installed-dev ## check style, format, words, class names, commit subjects and locks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tools.check_words
	$(BIN)/python -m tools.check_names
	$(BIN)/python -m tools.check_commits
	$(BIN)/python -m tools.lock --check

types: $(VENV)/installed-dev ## check types (mypy, strict)
	$(BIN)/mypy

lint-imports: $(VENV)/installed-dev ## check the import contracts
	PYTHONPATH=.:platform $(BIN)/lint-imports

check: lint types lint-imports docs test-all test-browser test-faults bench-quick test-clients ## run all checks and tests

docs: generated $(VENV)/installed-docs ## build the documentation site into build/site; fails on a broken link
	@PYTHONPATH=.:platform NO_MKDOCS_2_WARNING=1 exec $(BIN)/mkdocs build --strict

messages: $(VENV)/installed-dev ## update the catalogs of translations in frontend/locale, and compile them
	@$(BIN)/python -m tools.messages; status=$$?; $(BIN)/python -m tools.build_files; exit $$status

docs-openapi: $(VENV)/installed-dev generated ## update docs/openapi.yaml and docs/management-openapi.yaml from the code
	@PYTHONPATH=.:platform $(BIN)/python -m tools.openapi

api-diff: setup ## show how the two API documents differ from those of the main branch (ARGS=COMMIT: of another commit)
	@$(BIN)/python -m tools.openapi.changes $(ARGS)

screenshots: $(VENV)/installed-dev generated ## take pictures of all screens for the site, with demo tenants; takes minutes
	@PYTHONPATH=.:platform exec $(BIN)/python -m tests.support.frontend.make_screenshots

release: $(VENV)/installed ## build the sdist and the wheels into dist: for all machines, and with the kernels for this architecture
	@rm -rf dist && $(BIN)/python -m hatchling build --directory dist
	@MILLRACE_WHEEL_KERNELS=1 $(BIN)/python -m hatchling build --target wheel --directory dist
	@rm -rf kernels/native/prebuilt

lock: $(VENV)/installed ## lock the newest allowed versions (ARGS="--upgrade-package django" for one)
	@$(BIN)/python -m tools.lock $(or $(ARGS),--upgrade)

lock-platforms: $(VENV)/installed ## check that each supported Python on x86-64 and ARM64 finds a wheel of every locked package
	@$(BIN)/python -m tools.lock --platforms

clean: ## remove what was installed and cached; the data stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: reinstalled when a requirement changes. The installer's output goes to $(VENV)/install.log.

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo 'make: Python 3.11 to 3.14 is needed; name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@echo 'Making a virtual environment in $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv --without-pip $(VENV) || { rm -rf $(VENV); \
		echo 'make: no virtual environment: install the venv module of $(PYTHON)' >&2; exit 1; }

$(VENV)/installed: requirements.lock pyproject.toml | $(VENV)/bin/python
	@echo 'Installing (once; the first time this takes some minutes)'
	@$(BIN)/python -m tools.install server
	@touch $@

$(VENV)/installed-dev: requirements.lock $(VENV)/installed
	@echo 'Installing what tests and checks need'
	@$(BIN)/python -m tools.install dev
	@touch $@

$(VENV)/installed-docs: requirements.lock | $(VENV)/bin/python
	@echo 'Installing what the documentation site needs'
	@$(BIN)/python -m tools.install docs
	@touch $@
