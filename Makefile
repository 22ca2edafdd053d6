# make demo needs only python3 (3.11 or newer, with venv). Installing happens once, in .venv.

PYTHON ?= python3
VENV ?= .venv
# With libtpu, which would change how JAX starts in the other one.
TPU_VENV ?= .venv-tpu
DEMO_RUN ?= runs/demo

BIN := $(VENV)/bin
INSTALL_INPUTS := setup.cfg pyproject.toml constraints.txt

.PHONY: demo test test-slow test-parity test-tpu-compile compile-all lint format clean

demo: $(VENV)/installed
	$(BIN)/python train.py --config=configs/demo.py --workdir=$(DEMO_RUN)
	$(BIN)/python -m refusion_jax.demo --checkpoint=$(DEMO_RUN)

# Files run side by side: most of the time is XLA compiling, which uses one core.
test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n auto --dist loadfile

test-slow: $(VENV)/installed-test
	$(BIN)/python -m pytest -n auto --dist loadfile -m "slow and not tpu_compile"

# Against PyTorch and transformers, which nothing else needs.
test-parity: $(VENV)/installed-parity
	$(BIN)/python -m pytest -n auto --dist loadfile -m parity tests/parity

# With the compiler of real TPUs, of which there need be none.
test-tpu-compile: $(TPU_VENV)/installed
	$(TPU_VENV)/bin/python -m pytest -n auto -m "tpu_compile and not slow" tests/compilation

# Every preset at its full depth: an hour or two.
compile-all: $(TPU_VENV)/installed
	$(TPU_VENV)/bin/python -m pytest -m "tpu_compile and slow" -s tests/compilation

lint: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# What runs wrote and the environment stay: they take long to make again.
clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(TPU_VENV)/*' -prune -exec rm -rf {} +

# The stamps are newer than what they installed from, so an unchanged checkout asks the network for nothing.
$(VENV)/installed: $(INSTALL_INPUTS)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -e . -c constraints.txt
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --disable-pip-version-check -e '.[test]' -c constraints.txt
	touch $@

$(TPU_VENV)/installed: $(INSTALL_INPUTS)
	test -x $(TPU_VENV)/bin/pip || $(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/pip install --disable-pip-version-check -e '.[test,tpu]' -c constraints.txt
	touch $@

$(VENV)/installed-parity: $(VENV)/installed-test
	$(BIN)/pip install --disable-pip-version-check 'torch==2.13.0' 'transformers>=5.0' accelerate -c constraints.txt
	touch $@
