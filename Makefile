# Every target installs what it needs. `make help` lists them.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TRINITY := .venv-trinity

# The theme announces its successor on every build.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install install-trinity demo test test-core test-trinity check guard docs bench tiny-agent clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv and install the package into it, with all that development needs.

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into .venv; the first time this takes a few minutes."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"`$(PYTHON)` is Python {sys.version.split()[0]}; Python 3.11 or 3.12 is needed: make install PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

install-trinity: $(TRINITY)/.installed ## Create .venv-trinity, with the older versions that Trinity-RFT needs.

$(TRINITY)/.installed: pyproject.toml constraints-trinity.txt
	@echo "Installing Trinity-RFT into $(TRINITY); the first time this takes a few minutes."
	@$(PYTHON) -m venv $(TRINITY)
	@$(TRINITY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-trinity.txt -e '.[trinity]' pytest
	@touch $@

demo: install ## Train the small example agent on this machine and show what it learned.
	@$(BIN)/python examples/math_agent/main.py

test: test-core test-trinity ## Run all tests.

test-core: install ## Run all tests but those of Trinity-RFT, and measure what they cover.
	$(BIN)/pytest --cov --cov-report=term

test-trinity: install-trinity ## Run the tests of Trinity-RFT, in an environment of their own.
	$(TRINITY)/bin/pytest -c tests/trinity/pytest.ini tests/trinity

check: install ## The gate, with `make test`: formatting, lint, types and documentation.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/mkdocs build --strict --quiet

guard: install ## Fail where sampling or training is slower than what docs/performance says. Takes a few minutes.
	$(BIN)/python benchmarks/guard.py

docs: install ## Write the settings reference anew and build the documentation into site/.
	$(BIN)/python docs/generate_reference.py
	$(BIN)/mkdocs build --strict

bench: install ## Run all benchmarks, one after the other.
	@set -e; for script in $(filter-out %/common.py %/guard.py %/report.py %/vllm_side.py,$(wildcard benchmarks/*.py)) benchmarks/report.py; do \
		echo "== $$script"; $(BIN)/python "$$script"; done

tiny-agent: install ## Build the model that ships with the package.
	$(BIN)/python recipes/tiny_agent/build.py

clean: ## Remove everything that can be made again, except runs/.
	rm -rf .venv .venv-trinity .cache .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
