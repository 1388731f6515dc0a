# Needs Python 3.11 and make; everything else is installed into .venv. `make` alone lists the targets.

# The interpreter that makes .venv. Empty: python3.11, else python3, whichever is a working 3.11.
PYTHON       ?=
# On a machine with a GPU: make run REQUIREMENTS=requirements-gpu.txt
REQUIREMENTS ?= requirements.txt
JOB          ?= configs/movie_reviews.toml
TEXT         ?= a warm , funny and moving film with two wonderful leads .
# More arguments: make run RUN_ARGS='--set training.epochs=2'; make test PYTEST_ARGS='-k attention'; make lock LOCK_ARGS=--upgrade
RUN_ARGS     ?=
PYTEST_ARGS  ?=
# Test processes at a time; 0 for a debugger. A file's tests stay together: they share what they trained.
TEST_PROCESSES ?= auto
LOCK_ARGS    ?=

VENV  := .venv
BIN   := $(VENV)/bin
# A copy of the requirements that .venv holds, written last: an interrupted install leaves none.
STAMP := $(VENV)/installed-requirements.txt

.PHONY: help venv run test lint lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' Makefile

# Compared by content, not by time: a second call, or a new checkout of the same file, installs nothing. Other
# requirements start an empty .venv, since pip never removes and onnxruntime and onnxruntime-gpu share a folder.
venv: ## .venv with the pinned requirements
	@if cmp -s $(REQUIREMENTS) $(STAMP) && $(BIN)/python -c '' 2>/dev/null; then exit 0; fi; \
	test -r $(REQUIREMENTS) || { echo "make: cannot read $(REQUIREMENTS)." >&2; exit 1; }; \
	python=; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3); do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
			python=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "make: Python 3.11 is needed, and $(if $(PYTHON),$(PYTHON) is not one,neither python3.11 nor python3 is one). Give its path: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi; \
	echo "Installing $(REQUIREMENTS) into $(VENV); the first time this takes some minutes ..." && \
	rm -rf $(VENV) && \
	"$$python" -m venv $(VENV) && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS) && \
	$(BIN)/python -m pip --disable-pip-version-check check && \
	cp $(REQUIREMENTS) $(STAMP).part && \
	mv $(STAMP).part $(STAMP)

run: venv ## demo data, the whole job, and one prediction by the published ONNX file in a new process
	@$(BIN)/python configs/get_demo_data.py
	@$(BIN)/python -m pipeline run $(JOB) $(RUN_ARGS)
	@newest=$$($(BIN)/python -c 'import sys; from pipeline import config, contract; \
	sets = [a.removeprefix("--set=") for a in sys.argv[2:] if "=" in a]; \
	d = config.load_job(sys.argv[1], sets).model_dir; v = contract.versions(d); \
	print(v[max(v)]) if v else sys.exit(f"make: nothing is published under {d}.")' $(JOB) $(RUN_ARGS)) && \
	echo "A new process, $$newest/onnx/model.onnx:" && \
	$(BIN)/python -m serving predict --model "$$newest" "$(TEXT)"

test: venv ## all tests
	@$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

lint: venv ## ruff
	@$(BIN)/ruff check .

# For Linux on x86-64, wherever it is run. The pins that the files already hold are kept while they still fit;
# LOCK_ARGS=--upgrade takes the newest. No hashes: a company's own mirror may serve wheels that it built itself
# (LOCK_ARGS=--generate-hashes adds them).
UV_LOCK = $(BIN)/uv pip compile --quiet --no-config --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	--custom-compile-command 'make lock' --no-emit-index-url --no-emit-find-links $(LOCK_ARGS)
lock: venv ## requirements.txt and requirements-gpu.txt anew from pyproject.toml
	@$(UV_LOCK) --all-extras pyproject.toml --output-file requirements.txt
	@$(UV_LOCK) --all-extras --group gpu pyproject.toml --constraint requirements.txt \
		--no-strip-extras --no-emit-package onnxruntime --output-file requirements-gpu.txt

# Not data/, runs/ and models/: they can't be had back by a command in minutes.
clean: ## remove .venv and caches; keeps data/, runs/ and models/
	@rm -rf $(VENV) .pytest_cache .ruff_cache build dist *.egg-info
	@find pipeline export serving tests configs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
