# Start with `make quickstart` and `make test-fast`. Both make .venv first; after that no network is needed.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: quickstart test test-fast test-gpu lint schema docs docs-test locks sbom soak soak-gpu flakes bench clean

quickstart: .venv/installed
	$(BIN)/finetune train recipes/quickstart.yaml

# The unit tests: two minutes on two cores
test-fast: export PYTHONDONTWRITEBYTECODE =
test-fast: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -m 'not soak and not alone' -n 2 --dist worksteal

# What CI runs: all but what takes too long (`make soak`) and what needs a GPU. First what runs alone, from the files that have such tests
ALONE = $(shell grep -rl --include='*.py' --exclude-dir=gpu 'mark\.alone' tests)
test: export PYTHONDONTWRITEBYTECODE =# what is compiled once serves the many processes that the tests start
test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(ALONE) -m 'alone and not soak and not gpu'
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not alone and not soak and not gpu' -n 2 --dist worksteal

# On a machine with a GPU of 80 GB and 16 cores: what measures time first, with nothing beside it. (A plugin of NVIDIA's
# images, pytest-benchmark, warns of xdist, and warnings are errors)
ON_GPU := $(BIN)/pytest tests/gpu -p no:benchmark
test-gpu: .venv/installed-dev
	$(ON_GPU) -m 'gpu and alone and not soak'
	$(ON_GPU) -m 'gpu and not alone and not soak' -n 6 --dist worksteal

soak-gpu: .venv/installed-dev
	$(ON_GPU) -m 'gpu and alone and soak'
	$(ON_GPU) -m 'gpu and not alone and soak' -n 6 --dist worksteal

lint: .venv/installed-dev
	$(BIN)/ruff format --check finetune scripts tests examples benchmarks docs
	$(BIN)/ruff check finetune scripts tests examples benchmarks docs
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --threads 2

soak: export PYTHONDONTWRITEBYTECODE =
soak: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'soak and alone and not gpu'
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'soak and not alone and not gpu' -n 2 --dist worksteal
	$(BIN)/python benchmarks/reliability.py --kills 100 --signals 50 --variants 20 --resume-matrix --rank-kills 20 --endurance 5000 --fuzz 10000 --seeded --saves --attacks
	$(BIN)/python benchmarks/tuning.py
	$(MAKE) schema

# Nothing may pass in one and fail in another
flakes: .venv/installed-dev
	for time in 1 2 3; do $(MAKE) test || exit 1; done

# What this machine can measure again, and the pages made from it; docs/reference/benchmarks.md names what else there is.
# ASSETS: a folder of real models and data, the tests' own; on a GPU other parts of evaluation.py than on a CPU
ASSETS ?= $(or $(FINETUNE_TEST_ASSETS),../shared/assets)
GPUS = $(filter-out 0,$(shell $(BIN)/python -c 'import torch; print(torch.cuda.device_count())'))
WANT = @echo 'left out for want of ASSETS=FOLDER: $(firstword $1)'
real = $(if $(wildcard $(ASSETS)/commonsense),$(BIN)/python benchmarks/$1,$(WANT))
ROWS := lora-bf16,lora-fp8
bench: .venv/installed-dev
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/ablation.py
	$(BIN)/python benchmarks/quickstart.py --types lora
	$(BIN)/python benchmarks/tuning.py
	$(call real,data.py $(ASSETS) --times 3)
	$(call real,evaluation.py $(ASSETS) --part $(if $(GPUS),real,speed --limit 150))
	$(if $(GPUS),$(BIN)/python benchmarks/gpu.py --rows $(ROWS),@echo 'left out for want of a GPU: gpu.py attention.py products.py ab.py')
	$(if $(GPUS),$(BIN)/python benchmarks/attention.py)
	$(if $(GPUS),$(BIN)/python benchmarks/products.py)
	$(if $(GPUS),$(BIN)/python benchmarks/ab.py --gpus $(firstword $(GPUS)))
	$(if $(filter-out 1,$(GPUS)),$(BIN)/python benchmarks/multi_gpu.py --rows $(ROWS) --gpus $(GPUS))
	$(MAKE) schema

schema: .venv/installed
	$(BIN)/python scripts/make_schema.py
	$(BIN)/python scripts/make_task_files.py
	$(BIN)/python scripts/make_module_lists.py
	$(BIN)/python scripts/make_optimizations.py
	$(BIN)/python scripts/make_migration.py
	$(BIN)/python scripts/make_tables.py
	$(BIN)/python scripts/make_reference.py
	$(BIN)/python scripts/make_diagrams.py
	$(BIN)/python scripts/make_terminal_pictures.py

# The documentation as pages to open from the disk: build/docs/index.html. No network is needed
docs: .venv/installed-docs
	$(BIN)/python -m sphinx -W -n -q -b html -d build/doctrees docs build/docs

# Every command, recipe, Python block and link of the documentation. `make test` runs the commands of README.md only
docs-test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/docs

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "finetune needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

# Nothing is installed but what `locks/` names, in the files whose hashes stand there: torch's build for CPUs where pip
# is pointed to one, else the registry's. What comes as source is built by what `locks/base.txt` has installed before.
LOCKED := $(BIN)/python -m pip install -q --no-compile --require-hashes --no-deps --no-build-isolation
TORCH := $(LOCKED) -r locks/torch-cpu.txt 2>/dev/null || $(LOCKED) -r locks/torch.txt
OURSELVES := $(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
EXTRAS := dev bnb quantize export eval sweep
# By all cores, which pip doesn't use. A file that this Python can't read is of another Python
COMPILE := $(BIN)/python -m compileall -q -j 0 -x /tests/ .venv/lib >/dev/null || true

.venv/installed: .venv/bin/python pyproject.toml locks/base.txt locks/torch.txt locks/torch-cpu.txt
	$(LOCKED) -r locks/base.txt
	$(TORCH)
	$(OURSELVES)
	$(COMPILE)
	touch $@

.venv/installed-dev: .venv/installed $(EXTRAS:%=locks/%.txt)
	$(LOCKED) $(EXTRAS:%=-r locks/%.txt)
	$(COMPILE)
	touch $@

.venv/installed-docs: .venv/installed locks/docs.txt
	$(LOCKED) -r locks/docs.txt
	$(COMPILE)
	touch $@

# Tools of a release, in an environment of their own: what `locks/` is made with, and a bill of materials (CycloneDX)
.tools/installed: locks/tools.txt
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install -q --require-hashes --no-deps -r locks/tools.txt
	touch $@

locks: .tools/installed
	.tools/bin/python scripts/make_locks.py

sbom: .tools/installed
	mkdir -p dist
	cat $(filter-out locks/dev.txt locks/docs.txt locks/tools.txt locks/torch-cpu.txt,$(wildcard locks/*.txt)) | .tools/bin/cyclonedx-py requirements \
	  --pyproject pyproject.toml --output-reproducible --of JSON -o dist/sbom.cdx.json -

clean:
	rm -rf .venv .tools build dist
