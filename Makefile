# Two commands: `make quickstart` and `make test`. Both make .venv first; after that no network is needed.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: quickstart test lint schema soak bench clean

quickstart: .venv/installed
	$(BIN)/finetune train recipes/quickstart.yaml

test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m alone
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not alone' -n 2 --dist worksteal

lint: .venv/installed-dev
	$(BIN)/ruff format --check finetune scripts tests examples
	$(BIN)/ruff check finetune scripts tests examples
	$(BIN)/pyright

soak: .venv/installed-dev
	$(BIN)/python benchmarks/reliability.py --kills 100 --signals 50 --rank-kills 20 --endurance 5000 --fuzz 10000 --seeded --attacks
	$(BIN)/python benchmarks/tuning.py

# What this machine can measure again; benchmarks/README.md names what else there is, and what needs data of its own
bench: .venv/installed-dev
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/ladder.py
	$(BIN)/python benchmarks/quickstart.py --types lora
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.cuda.is_available())' || $(BIN)/python benchmarks/gpu.py --rows lora-bf16,lora-fp8

schema: .venv/installed
	$(BIN)/python scripts/make_schema.py
	$(BIN)/python scripts/make_optimizations.py
	$(BIN)/python scripts/make_tables.py

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "finetune needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,bnb,quantize,eval,tune]'
	touch .venv/installed $@

clean:
	rm -rf .venv build dist
