SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-stack test test-vllm test-vllm-nightly setup-vllm test-containers image check bench accuracy soak uninstall-check bpf fuzz-nightly clean

PY := .venv/bin/python

help:
	@echo 'make setup   all that is needed, on a bare Debian 12, into .venv (as root: packages too)'
	@echo 'make demo    serve a real model, attach to it, explain its slowest request'
	@echo 'make demo-stack  the demo beside Prometheus and Alertmanager: a violation, told by both (4 min)'
	@echo 'make test    set-up, checks and every test'
	@echo 'make test-vllm  the tests against a real vLLM server, in an environment of its own (3.5 GB)'
	@echo 'make test-vllm-nightly  those and more: DeepSeek, the names in other versions of vLLM'
	@echo 'make image   the image of the sidecar, with buildah; says how large it is (BASE=... another base)'
	@echo 'make test-containers  builds it, and runs it beside an engine in real containers'
	@echo 'make check   ruff, mypy --strict, the direction of imports'
	@echo 'make bench   measure, and write docs/benchmarks.md'
	@echo 'make accuracy  real faults on a real engine: how often the account is right (25 min)'
	@echo 'make soak    the sidecar beside engines that are loaded, killed and disturbed (60 min; MINUTES=...)'
	@echo 'make uninstall-check  what the sidecar changes in a pod, and what stays: nothing'
	@echo 'make fuzz-nightly  coverage-guided fuzzing of all that reads others'"'"' bytes (35 min)'
	@echo 'make bpf     compile the BPF objects'
	@echo 'make clean   remove what was built; .venv stays'

setup:
	@bash scripts/setup.sh

demo:
	@bash scripts/setup.sh --for-demo
	@.venv/bin/dsagent demo

demo-stack: setup
	@$(PY) scripts/demo_stack

test:
	@begun=$$(date +%s); bash scripts/setup.sh; exec $(PY) scripts/test.py --begun "$$begun"

setup-vllm: setup
	@bash scripts/setup_vllm.sh

test-vllm: setup-vllm
	@DSAGENT_REQUIRE_VLLM=1 $(PY) -m pytest tests/vllm -m 'not nightly'

test-vllm-nightly: setup-vllm
	@DSAGENT_REQUIRE_VLLM=1 $(PY) -m pytest tests/vllm

image:
	@python3 scripts/image.py build $(if $(BASE),--base $(BASE))

test-containers: setup
	@bash scripts/setup_containers.sh
	@DSAGENT_REQUIRE_CONTAINERS=1 $(PY) -m pytest tests/containers

check:
	@bash scripts/check.sh

bench: setup
	@$(PY) scripts/bench.py

accuracy: setup
	@$(PY) tests/accuracy/run.py

soak: setup
	@$(PY) tests/soak/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(WRITE),--write)

uninstall-check: setup
	@$(PY) tests/soak/uninstall_check.py

bpf:
	@$(PY) -m dsagent.agent.sources.bpf.build

fuzz-nightly: setup
	@$(PY) tests/fuzz/nightly.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f agent/sources/bpf/*.bpf.o agent/sources/bpf/vmlinux.h
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
