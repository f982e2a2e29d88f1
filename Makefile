# Everything a developer runs, by the same names in CI. `make` alone lists the targets.
# Works with GNU make 3.81 (macOS) and later; needs Python 3.11 or newer with venv.

VENV        ?= .venv
PYTHON      ?= python3
PARTITA_CONSTRAINTS ?= constraints.txt
CONSTRAINTS ?= $(PARTITA_CONSTRAINTS)
# Which ONNX Runtime wheel: onnxruntime-gpu has no builds for macOS and few for other processors. Both run on the CPU.
RUNTIME     ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),gpu,cpu)
EXTRAS      ?= export,$(RUNTIME),dev
PYTEST_ARGS ?=
BENCH_ARGS  ?=

BIN     := $(VENV)/bin
comma   := ,
# The stamp carries the extras, so that asking for others installs again.
STAMP   := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
PACKAGE := build/demo/package
REPORT  := build/demo/report.json

.PHONY: help install demo test check bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@echo "make TARGET [VENV=.venv] [PYTHON=python3] [CONSTRAINTS=constraints.txt] [EXTRAS=$(EXTRAS)]"
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1	\2/p' Makefile

install: $(STAMP) ## create the virtual environment and install Partita into it, editable

# A venv made for other extras is made anew: two ONNX Runtime wheels in one environment overwrite each other's files.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Partita needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@for stamp in $(VENV)/.installed-*; do \
	  if [ -e "$$stamp" ] && [ "$$stamp" != "$(STAMP)" ]; then rm -rf "$(VENV)"; fi; done
	@echo "installing partita[$(EXTRAS)] into $(VENV) (the first time takes some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
	@touch $(STAMP)

demo: install ## export the embedded checkpoint, generate from it, and show the partition report
	@mkdir -p build/demo
	$(BIN)/partita export partita/demo/checkpoint $(PACKAGE) --force
	$(BIN)/partita generate $(PACKAGE) "def open(file, mode='r'):" --max-new-tokens 80 \
	  --temperature 0.6 --top-p 0.9 --seed 3 --report $(REPORT)
	$(BIN)/partita report show $(REPORT)
	@echo
	@echo "Files:"
	@echo "  $(PACKAGE)	the exported package: manifest, graph, weights, known answer, tokenizer"
	@echo "  $(REPORT)	the partition report of the run above"
	@echo "Next:"
	@echo "  $(BIN)/partita verify $(PACKAGE)	replay the original model's answer, without torch"
	@echo "  $(BIN)/partita generate $(PACKAGE) \"Raises\" --temperature 0.8 --seed 1"
	@echo "  $(BIN)/partita export FOLDER_WITH_YOUR_CHECKPOINT build/mine"

test: install ## run the whole test suite
	@mkdir -p build
	@$(BIN)/python -m pytest $(PYTEST_ARGS); code=$$?; echo $$code > build/pytest-exit-code; exit $$code

check: install ## ruff, mypy --strict and the import rules; all three run even when one fails
	@failed=; \
	for step in "ruff check ." "mypy" "python -m pytest --quiet tests/test_imports.py"; do \
	  echo "$$step"; $(BIN)/$$step || failed="$$failed [$$step]"; \
	done; \
	if [ -n "$$failed" ]; then echo "make check: failed:$$failed" >&2; exit 1; fi

bench: install ## measure export, and generation against a bare loop and against transformers
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean: ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find partita tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
