# The two commands of the README. Each makes its own virtual environment, so that nothing left on a machine helps it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test nightly machines check docs install clean

# The main job on CPU: real tiny models, seven strategies, four drivers, 2-rank gloo groups, each once. Without the
# profile it is the whole default matrix, some minutes.
demo: install
	HF_HUB_OFFLINE=1 $(BIN)/pytest --pyargs pytest_distcompat.suite --distcompat-gpus 0 --distcompat-profile smoke -q

# All checks of the code itself, then the tests, on three workers, for half of the time tests wait: a module is one worker's,
# for its tests share what they ran.
test: install check
	HF_HUB_OFFLINE=1 $(BIN)/pytest tests -n 3 --dist loadscope --no-loadscope-reorder -m "not nightly"

# Those too that show with another strategy, or another upstream bug, what a test of every day shows with one.
nightly: install check
	HF_HUB_OFFLINE=1 $(BIN)/pytest tests -n 2 --dist loadscope --no-loadscope-reorder

# Tests that need a Slurm, a Ray cluster or hosts of their own, as root on Debian. With `ONLY='-m "not nightly"'` one of each.
machines: install
	apt-get install -y slurm-wlm munge iproute2
	$(BIN)/pip install --quiet 'ray[default]>=2.49' 'kubernetes-validate>=1.30'
	HF_HUB_OFFLINE=1 $(BIN)/pytest tests/machines tests/nodes $(ONLY)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# The site, into build/site; a dead link or any other warning is an error.
docs: install
	$(BIN)/mkdocs build --strict

install: $(VENV)/installed

# torch first and pinned: on its own it would come in the newest version with gigabytes of CUDA.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	touch $(VENV)/installed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
