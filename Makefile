# Two commands matter: `make demo` shows the main job, `make test` is what CI checks.
# Both start from nothing (own .venv) and reuse what is there the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo
EXAMPLES := quickstart long-prompt-arrives batch-sweep launch-bound gather-cost
# Spinning threads starve each other where other work shares the cores; tests do not time anything.
test: export OMP_WAIT_POLICY = PASSIVE

.PHONY: demo test lint bench gpu-check reports clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'stepscope needs Python 3.11 or newer; give one with PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/stepscope run scenarios/quickstart.toml -o $(DEMO) --force
	$(BIN)/stepscope report $(DEMO) -o $(DEMO)/report.html --force
	$(BIN)/stepscope report $(DEMO) -o $(DEMO)/report.png --force

test: $(STAMP) lint
	$(BIN)/stepscope models fetch smollm2-135m
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m tests.bench --output bench.json

# A GPU machine has a torch of its own and perhaps no network: nothing is installed for this one.
# The check exits with 4 where it cannot judge; make reports that as "Error 4" and itself exits 2.
gpu-check:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu_check

reports: $(STAMP)
	for name in $(EXAMPLES); do \
	  $(BIN)/stepscope run scenarios/$$name.toml -o runs/reports/$$name --force && \
	  $(BIN)/stepscope report runs/reports/$$name -o reports/$$name.html --force && \
	  $(BIN)/stepscope report runs/reports/$$name -o reports/$$name.png --force || exit 1; \
	done

clean:
	rm -rf $(VENV) runs bench.json build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
