# Targets are idempotent and quick when nothing changed. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
# Elsewhere (make setup VENV=/scratch/me/trainyard) .venv becomes a link to it, so that later commands need no VENV.
VENV := .venv
PY := .venv/bin/python
KERNEL := train/data/jpeg_crop# .built is newer than .c, unless an update of the code brought another .c
ARCH ?= resnet18
# Where it is set, no process keeps what it compiled: each worker then collects the tests in 25 s of a core, not in 14.
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help
# Tests that need a real service; the rest is the quick part.
CLUSTER := slurm or condor or osdf or mpi
# Tests on simulated GPUs (tests/gpu_sim), on a real one where it is.
GPU := gpu or gpusim
# On real services what fails is tried once more, with new services and a new story: one busy moment must not refuse a
# change. Each such test is a bug to fix; RERUNS=0 has no second try, as all other parts.
RERUNS ?= 1
# Debian packages that tests use beside those that each service installs for itself.
APT_PACKAGES := libarchive-tools openmpi-bin chromium fonts-dejavu-core gcc g++ libc6-dev libjpeg62-turbo-dev iproute2 git
.PHONY: help setup system demo test test-unit test-trainings test-stories test-gpu test-cluster test-oldest lint format bench plugin soak cluster-up cluster-down clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/.done ## the .venv with the pinned packages (6 GB, about 3 minutes; docs/install.md)
	@[[ "$(VENV)" -ef .venv ]] || scripts/setup.sh "$(VENV)" "$(PYTHON)"
	@[[ ! $(KERNEL).c -nt $(KERNEL).built ]] || { $(PY) -m train.data.jpeg && touch $(KERNEL).built; }

.venv/.done: requirements.txt requirements-dev.txt
	@scripts/setup.sh "$(VENV)" "$(PYTHON)"

lint: setup ## ruff (lint and format) and mypy --strict
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup ## lets ruff rewrite what it can
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

system: setup ## Debian packages for the tests (root and apt; without them the tests say what they leave out)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  dpkg -s $(APT_PACKAGES) >/dev/null 2>&1 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(APT_PACKAGES) >/dev/null; }; \
	  $(PY) -m train.data.jpeg; \
	else echo "LEFT OUT: Debian packages ($(APT_PACKAGES)): needs root and apt"; fi

test: setup system lint test-unit test-trainings test-stories test-gpu test-cluster ## everything, on real SLURM, HTCondor and XRootD

# Its tests wait for each other's processes a third of the time: three workers fill two cores.
test-unit: setup ## the quick part: no service needed
	$(PY) -m pytest -n 3 --dist worksteal --in-memory -m "not ($(CLUSTER) or $(GPU) or story or training)"

test-trainings: setup ## real trainings in processes of their own: killed, resumed, streamed; no service needed
	$(PY) -m pytest -n 3 --dist worksteal --in-memory -m "training and not ($(CLUSTER) or $(GPU))"

test-stories: setup ## a few whole stories as a user lives them: the demo, a study, torchrun, the doctor's tour
	$(PY) -m pytest -n 2 --dist worksteal -m story

test-gpu: setup system ## the part on a GPU, simulated where there is none
	$(PY) -m pytest -n 2 -m "$(GPU)"

# Each worker starts services of its own, on their own ports: its tests mostly wait for them. WORKERS=0 is one process.
WORKERS ?= 2
ON_SERVICES := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(CLUSTER)"
test-cluster: setup system ## the part on real services, which it starts and stops
	$(PY) $(ON_SERVICES) || { (( $$? == 1 && $(RERUNS) )) && echo "RERUN: what failed above, once more" && \
	  $(PY) $(ON_SERVICES) --last-failed --last-failed-no-failures none; }

# The floor of README's promise, in an environment of its own (2.5 GB); PYTHON_OLDEST names a Python 3.10.
PYTHON_OLDEST ?= python3.10
OLDEST := torch==2.1.2 torchvision==0.16.2 'numpy<2' pillow
test-oldest: ## fetch and train once on the oldest Python and torch that we promise (not part of make test)
	@command -v $(PYTHON_OLDEST) >/dev/null || { echo "error: no $(PYTHON_OLDEST) here; name a Python 3.10: make test-oldest PYTHON_OLDEST=..." >&2; exit 2; }
	@test -e .venv-oldest/.done || { $(PYTHON_OLDEST) -m venv .venv-oldest && \
	  .venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(OLDEST) && touch .venv-oldest/.done; }
	tests/oldest.sh .venv-oldest/bin/python

soak: setup system ## the long repetitions: hundreds of kills, 100 bad weeks (an hour or more)
	$(PY) -m pytest --soak --timeout 3600

demo: setup ## a fake ImageNet, a study on 1 and 2 processes, its table and report.html (4 minutes; ARCH=resnet50)
	@PYTHON=$(PY) ARCH=$(ARCH) scripts/demo.sh

# One file per question; each prints its ratios against peers of the same run. Quietest on an idle machine. The
# records go to run_results/benchmarks/local, which git ignores; SAVE=1 writes the committed ones, which the docs show.
# benchmarks/convergence.py, an hour by itself, is run by hand (docs/training.md).
BENCHMARKS := loader loader_latency step ddp epoch_overhead time_to_first_step startup_exchange memory extract index order fetch placement stream osg_week large_batch search
bench: setup system ## every benchmark, as tables of ratios (an hour; BENCHMARKS="loader extract" for some; SAVE=1)
	@for name in $(BENCHMARKS); do \
	  printf '\n== benchmarks/%s.py\n' $$name; $(PY) benchmarks/$$name.py $(if $(SAVE),--save) || exit 1; done

plugin: condor/osdf_plugin ## the HTCondor transfer plugin, one file
condor/osdf_plugin: condor/osdf_plugin.py scripts/build_plugin.py $(wildcard dataset/*.py dataset/*/*.py)
	$(PYTHON) scripts/build_plugin.py

cluster-up: setup system ## starts SLURM, HTCondor and the mini-OSDF, and says how to use them
	$(PY) -m tests.cluster up

cluster-down: setup ## stops them; nothing is left (asks before it deletes your files; FORCE=1 does not)
	@$(PY) -m tests.cluster down $(if $(FORCE),--force)

clean: ## removes what make made here, the records of runs excepted
	rm -rf .venv .venv-oldest $(KERNEL).built train/data/*.so train/data/libjpeg-*.so* demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
