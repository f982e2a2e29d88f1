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
PEERS_ARGS  ?=
BREADTH_ARGS ?=
# The interpreters of `make smoke-pythons`, by name or path.
PYTHONS     ?= python3.12 python3.13
TRUTH_ARGS ?=
# Which environments `make test` tests, by the names in tests/contract/expectations.py; main is $(VENV).
ENVIRONMENTS ?= main openvino webgpu qnn plugins
VENVS       ?= .venvs

BIN     := $(VENV)/bin
comma   := ,
# The stamp carries the extras, so that asking for others installs again.
STAMP   := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
PACKAGE := build/demo/package
REPORT  := build/demo/report.json

# Environments of their own, because only one ONNX Runtime wheel fits in one: name = extra = constraints/name.txt.
NAMES       := openvino webgpu qnn plugins
ENV_TARGETS := $(NAMES:%=env-%)
WANTED      := $(filter $(NAMES:%=env-%),$(ENVIRONMENTS:%=env-%))

# Peers of `make bench-peers`, an environment each: name = constraints/name.txt, which is all that fixes its versions.
PEER_ENVS    := peer-genai peer-llama peer-optimum
# The one that `python -m benchmarks.peers --provider cuda` has beside the main environment; it takes an NVIDIA GPU to run.
GPU_PEER_ENV := peer-genai-cuda
peer-genai-cuda := onnxruntime-genai-cuda onnxruntime-gpu onnx onnx-ir torch transformers
peer-genai   := onnxruntime-genai onnxruntime onnx onnx-ir torch transformers
peer-llama   := llama-cpp-python gguf
peer-optimum := optimum-onnx onnxruntime onnx torch transformers accelerate
# What `--exporter optimum` runs in. It cannot be an extra of Partita's: optimum-onnx needs transformers before 4.58.
OPTIMUM_ENV := optimum
optimum     := optimum-onnx onnxruntime onnx torch transformers accelerate
# What opens the node data of `report show --view model-explorer` in its test, without most of its dependencies.
model-explorer := --no-deps --requirement constraints/model-explorer.txt
# llama.cpp is built for this very processor, with its AMX kernels where there is such a unit. GCC before 12.4 and 13.3
# drops most of the tile configuration that these load, as a dead store, and they crash; the flags keep it from that.
LLAMA_FLAGS  ?= -fno-tree-dse -fno-dse
LLAMA_JOBS   ?= 2

# Two processes of tests share the cores: threads of torch that wait for each other then wait for a time slice, and an
# export took twice the processor time (33 s in place of 19, of the embedded checkpoint in int4).
TEST_THREADS ?= OMP_NUM_THREADS=1

# Where it is set, every child process of a test compiles Partita and all that it imports anew: 0.8 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install envs $(ENV_TARGETS) env-model-explorer env-optimum peer-envs $(PEER_ENVS) $(GPU_PEER_ENV) bench-peers demo test test-heavy test-optimum test-ray test-cuda unconstrained smoke-pythons truth breadth docs support-tables check bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@echo "make TARGET [VENV=.venv] [PYTHON=python3] [CONSTRAINTS=constraints.txt] [EXTRAS=$(EXTRAS)]"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1	\2/p' Makefile
	@echo "  env-NAME	create one of these environments: $(NAMES)"

install: $(STAMP) ## create the virtual environment and install Partita into it, editable

# A venv made for other extras is made anew: two ONNX Runtime wheels in one environment overwrite each other's files.
# Python compiles what is imported, which is a fifth of the 20,000 modules.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Partita needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@for stamp in $(VENV)/.installed-*; do \
	  if [ -e "$$stamp" ] && [ "$$stamp" != "$(STAMP)" ]; then rm -rf "$(VENV)"; fi; done
	@echo "installing partita[$(EXTRAS)] into $(VENV) (the first time takes some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-compile --constraint $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
	@touch $(STAMP)

# What a plain `pip install "partita[cpu,export]"` gives: the newest versions that pyproject.toml allows. torch comes first, in the
# tested build, so that pip does not fetch CUDA libraries. The second round has the oldest transformers that it allows, and
# a family of each kind of layer: attention, experts, states.
unconstrained: ## export, verify and generate with small families in a fresh environment without constraints; minutes
	@rm -rf $(VENVS)/unconstrained && mkdir -p $(VENVS)
	@$(PYTHON) -m venv $(VENVS)/unconstrained
	@pip() { $(VENVS)/unconstrained/bin/python -m pip --disable-pip-version-check --quiet install --no-compile "$$@" \
	  || { echo "unconstrained: NOT RUN: pip could not install $$*" >&2; exit 1; }; }; \
	check() { PYTHONPATH=. $(TEST_THREADS) $(VENVS)/unconstrained/bin/python -m tests.unconstrained "$$@"; }; \
	pip "$$(grep '^torch==' $(CONSTRAINTS))" && pip ".[cpu,export]" && check \
	  && pip "transformers==$$(sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml).*" && check llama qwen3_moe mamba

envs: $(ENV_TARGETS) env-model-explorer ## create the environments of the other ONNX Runtime wheels and of Model Explorer, in .venvs/; `make -j2 envs` is faster

$(ENV_TARGETS): env-%: $(VENVS)/%/.installed

# Made anew when its versions change: see the two wheels above. Without torch: packages are exported in the main one.
# What went wrong stays in $(VENVS)/NAME.failed, and is the reason that its tests are skipped with.
$(VENVS)/%/.installed: pyproject.toml $(CONSTRAINTS) constraints/%.txt
	@rm -rf $(VENVS)/$* $(VENVS)/$*.failed && mkdir -p $(VENVS)
	@echo "installing partita[$*,test] into $(VENVS)/$*"
	@{ $(PYTHON) -m venv $(VENVS)/$* && \
	  $(VENVS)/$*/bin/python -m pip --disable-pip-version-check --quiet install --no-compile \
	    --constraint $(CONSTRAINTS) --constraint constraints/$*.txt --editable ".[$*,test]"; \
	} 2>$(VENVS)/$*.log || \
	  { grep -i error $(VENVS)/$*.log | tail -n 1 > $(VENVS)/$*.failed; cat $(VENVS)/$*.log >&2; rm -rf $(VENVS)/$*; exit 1; }
	@touch $@

env-model-explorer: $(VENVS)/model-explorer/.installed ## create the environment of Model Explorer, in .venvs/model-explorer

env-optimum: $(VENVS)/optimum/.installed ## create the environment of `partita export --exporter optimum`, in .venvs/optimum

peer-envs: $(PEER_ENVS) ## create the environments of the peers, in .venvs/; llama.cpp is compiled for this processor

$(PEER_ENVS) $(GPU_PEER_ENV): %: $(VENVS)/%/.installed

# Partita is in none of them: its benchmarks are run there from this folder, its exporter starts a script there. No cache: wheels in it do not tell their flags.
$(PEER_ENVS:%=$(VENVS)/%/.installed) $(GPU_PEER_ENV:%=$(VENVS)/%/.installed) $(VENVS)/$(OPTIMUM_ENV)/.installed $(VENVS)/model-explorer/.installed: $(VENVS)/%/.installed: constraints/%.txt
	@rm -rf $(VENVS)/$* && mkdir -p $(VENVS)
	@echo "installing $($*) into $(VENVS)/$*"
	@$(PYTHON) -m venv $(VENVS)/$*
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" CXXFLAGS="$(LLAMA_FLAGS)" CMAKE_BUILD_PARALLEL_LEVEL=$(LLAMA_JOBS) \
	  $(VENVS)/$*/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-cache-dir --no-binary llama-cpp-python \
	  --constraint constraints/$*.txt $($*) || { rm -rf $(VENVS)/$*; exit 1; }
	@touch $@

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

# An environment that cannot be made here does not stop the others: its tests are skipped with the reason.
test: install ## run the whole test suite, and the contract tests of every environment in ENVIRONMENTS
	@mkdir -p build
	@$(if $(WANTED),$(MAKE) --no-print-directory --keep-going -j 2 $(WANTED) || true,true)
	@$(TEST_THREADS) $(BIN)/python -m pytest tests --share --environments="$(ENVIRONMENTS)" --venvs=$(VENVS) $(PYTEST_ARGS); \
	  code=$$?; echo $$code > build/pytest-exit-code; exit $$code

test-heavy: install ## run the cases of which `make test` has samples: an hour on two cores
	PARTITA_HEAVY=1 $(TEST_THREADS) $(BIN)/python -m pytest tests -m heavy $(PYTEST_ARGS)

test-optimum: install env-optimum ## run the tests with real exports of optimum, and with its ORTModelForCausalLM; minutes
	PARTITA_HEAVY=1 PARTITA_OPTIMUM_PYTHON=$(abspath $(VENVS))/optimum/bin/python $(BIN)/python -m pytest tests/optimum $(PYTEST_ARGS)

test-ray: install ## run the tests of prompt files on a Ray cluster, with killed workers and drivers; minutes
	PARTITA_HEAVY=1 $(BIN)/python -m pytest tests/library/batches/test_cluster.py $(PYTEST_ARGS)

test-cuda: install ## run the contract tests with the cuda provider; fails where there is no NVIDIA GPU
	$(BIN)/python -m pytest tests/contract --environments=cuda $(PYTEST_ARGS)

smoke-pythons: demo ## verify, generate and report with the demo package on other versions of Python; minutes
	@for python in $(PYTHONS); do \
	  $$python --version >/dev/null 2>&1 || { echo "$$python: NOT RUN: not installed"; continue; }; \
	  folder=$(VENVS)/$$(basename $$python); rm -rf $$folder; \
	  $$python -m venv $$folder && $$folder/bin/pip --disable-pip-version-check --quiet install -c $(CONSTRAINTS) ".[cpu]" \
	  && $$folder/bin/partita verify $(PACKAGE) --provider cpu \
	  && $$folder/bin/partita generate $(PACKAGE) "Return the" --max-new-tokens 8 --report build/smoke.json >/dev/null \
	  && $$folder/bin/partita report check build/smoke.json --require 'provider=cpu,share=1' \
	  || { echo "$$python: FAILED" >&2; exit 1; }; \
	done

truth: install ## all planted causes, and onnx's backend tests on cpu, webgpu and the CUDA dry run; hours
	@mkdir -p build
	@$(if $(WANTED),$(MAKE) --no-print-directory --keep-going -j 2 $(WANTED) || true,true)
	$(BIN)/python -m tests.planted
	$(BIN)/python -m tests.truth $(TRUTH_ARGS)

breadth: install ## export every model type of transformers, compare it with the original, and write docs/models.md; hours
	@mkdir -p build
	$(BIN)/python -m tests.export.breadth --jobs 2 --json build/breadth.json --docs docs/models.md --check $(BREADTH_ARGS)

docs: install ## write the documentation as a site to build/site, in strict mode
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

support-tables: install $(filter-out env-plugins,$(ENV_TARGETS)) ## measure which operators each installed provider supports, and write docs/support; minutes
	$(BIN)/python -m tools.support_tables

check: install ## ruff, mypy --strict, the examples and words of the docs, the import rules; all run even when one fails
	@failed=; \
	for step in "ruff check ." "mypy" "python -m tools.doc_examples" "python -m tools.words" "python -m pytest --quiet tests/test_imports.py"; do \
	  echo "$$step"; $(BIN)/$$step || failed="$$failed [$$step]"; \
	done; \
	if [ -n "$$failed" ]; then echo "make check: failed:$$failed" >&2; exit 1; fi

bench: install ## measure export and generation, Partita beside transformers
	PYTHONPATH=. $(BIN)/python -m benchmarks.peers --peers partita transformers --shapes 0.5b --precisions fp32 $(BENCH_ARGS)

bench-peers: install peer-envs ## Partita beside onnxruntime-genai, llama.cpp, optimum and transformers; writes benchmarks/results/README.md; hours
	PYTHONPATH=. $(BIN)/python -m benchmarks.peers --environments $(VENVS) --docs benchmarks/results/README.md $(PEERS_ARGS)

clean: ## remove the virtual environments and everything that was built
	rm -rf $(VENV) $(VENVS) build dist .pytest_cache .mypy_cache .ruff_cache
	find partita tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
