# `make help` lists the targets. Needs Python 3.11 or newer, make and git; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help install demo test check format site bench clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt $(wildcard locks/*.txt) scripts/install.py scripts/venv_state.py lora_rocm/hardware/wheels.py lora_rocm/hardware/wheels.toml
	@"$(PYTHON)" scripts/install.py --dev

install: ## make .venv and install everything into it (ARGS=--repair, --upgrade, --dry-run)
	@"$(PYTHON)" scripts/install.py --dev $(ARGS)

demo: $(STAMP) ## train a LoRA on the tiny base model that ships with the package
	$(BIN)/lora-rocm demo

# Bytecode is written even where the environment says not to: the workers would compile all libraries each.
# Four workers on two cores: many tests wait for a process or a clock.
test: $(STAMP) ## run the tests (ARGS="-k name" picks some)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)

check: $(STAMP) ## formatting, lint, types, spelling, English, architecture, the site
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/codespell lora_rocm tests scripts benchmarks recipes docs README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_portability.py tests/test_english.py tests/test_site.py

format: $(STAMP) ## format the code and sort its imports
	$(BIN)/python -m ruff check --select I --fix .
	$(BIN)/python -m ruff format .

site: $(STAMP) ## build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP) ## time the command line and the data check
	$(BIN)/python benchmarks/light.py

clean: ## delete caches of the tools (not .venv, not runs, not cache)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
