# Two commands for everyone: `make demo` and `make test`. Each sets up .venv first, when it has to.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test soak lint types check wheel clean

demo: $(STAMP)
	$(BIN)/dflash demo --out build/demo

# Several files at a time, a thread each; most tests start processes and wait for them.
WORKERS ?= 2
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The kill tests, a hundred kills each, with a seed of the day's own.
soak: $(STAMP)
	DFLASH_TEST_KILLS=100 DFLASH_TEST_SEED=$${DFLASH_TEST_SEED:-$$(date +%j)} $(BIN)/python -m pytest tests -k killed --timeout=3000

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The four folders are one package only once installed; the checker gets a tree of links to look at.
types: $(STAMP)
	@mkdir -p build/typing/dflash_offline
	@for room in extract store train pipelines; do ln -sfn ../../../$$room build/typing/dflash_offline/$$room; done
	$(BIN)/basedpyright

check: test lint types

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --outdir dist .

# Installed again only when what is to be installed changes.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
