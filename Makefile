# make demo    run the main job on a small real model and real text, end to end
# make test    all that decides whether a change is sound: 15 to 25 minutes on two cores
# make test-all   that, and what takes longer: real models and corpora, three and four ranks, soak; Slurm if it runs
# make soak    kill and resume training at random, KILLS=20 times, and compare with a run left alone
# make docs    build the docs site into _docs, offline
# make sync    after editing notebooks: write modules, README.md and pyproject.toml from them
# make venv    only set up .venv
# make gpu     check a GPU machine in 25 minutes: right, fast, as much memory as planned; DEVICE=cpu is a dry run
# make gpu-kit    a folder to carry to a GPU machine that can fetch nothing: KIT=runs/gpu-kit
#
# Each makes .venv first if there is none. Variables:
#   PYTHON=python3.12     the interpreter to make .venv with (default: the first of python3, python3.11, ... that is 3.11 or later)
#                         gpu: the one that has torch; nothing is installed into it
#   PIP_ARGS="..."        handed to every pip install, e.g. --index-url of an index with CPU-only or CUDA builds of torch
#   GPU_ARGS="..."        handed to gpu.py or gpu_kit.py, e.g. --minutes 60 or --lean

VENV := .venv
STAMP := $(VENV)/installed
BIN := $(VENV)/bin
PYTHON ?=
PIP_ARGS ?=

# Threads that wait must not burn the cores that other processes need.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
# A kernel of this environment, not of a user's other one.
export JUPYTER_PREFER_ENV_PATH := 1
# As many processes as cores, each with one thread.
ONE_THREAD := OMP_NUM_THREADS=1

.PHONY: help demo test test-all docs soak sync venv gpu gpu-kit
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(STAMP)
	@echo "== demo: prepare, stage I, stage II, baseline, evaluation, report"
	@$(BIN)/anchor-nb demo

test: $(STAMP)
	@echo "== test 1/3: settings, notebooks, modules and README.md are in step"
	@$(BIN)/python setup.py check
	@echo "== test 2/3: the notebooks run, each in a process of its own, and their assertions hold"
	@$(ONE_THREAD) $(BIN)/python tests/notebooks.py
	@echo "== test 3/3: pytest"
	@$(ONE_THREAD) $(BIN)/python -m pytest -q -ra --durations=10 -n logical --dist worksteal $(PYTEST_ARGS)

# tests/slurm/setup.sh sets ANCHOR_NB_SLURM
test-all: export ANCHOR_NB_TUTORIALS := 1
test-all: export ANCHOR_NB_REGISTRY := 1
test-all: export ANCHOR_NB_RANKS := 1
test-all: export ANCHOR_NB_SOAK := 1
test-all: test soak

docs: $(STAMP)
	@$(BIN)/python nbs/_site/make_site.py

soak: $(STAMP)
	@$(BIN)/python tests/soak.py --kills $(or $(KILLS),20)

sync: $(STAMP)
	@$(BIN)/python setup.py sync
	@$(BIN)/nbdev-export
	@$(BIN)/python setup.py parameters
	@$(BIN)/nbdev-clean
	@$(BIN)/python setup.py readme

venv: $(STAMP)

# with PYTHON, the machine's own torch, and no .venv
gpu: $(if $(PYTHON),,$(STAMP))
	@$(or $(PYTHON),$(BIN)/python) nbs/benchmarks/gpu.py $(if $(DEVICE),--device $(DEVICE)) $(GPU_ARGS)

gpu-kit: $(STAMP)
	@$(BIN)/python nbs/benchmarks/gpu_kit.py $(or $(KIT),runs/gpu-kit) $(GPU_ARGS)

$(STAMP): settings.ini setup.py constraints.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh -eu -c "$$make_venv"
	@echo "== installing torch, then anchor_nb with its pinned companions (some minutes, once)"
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) "$$(grep ^torch== constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e ".[dev]" -c constraints.txt
	@touch $(STAMP)

# Debian and Ubuntu ship Python without ensurepip unless python3-venv is installed. Then try, in this order:
# virtualenv, a pip from outside the environment, apt-get where we may, and else say what to install.
define make_venv
if [ -x "$$VENV/bin/python" ]; then
  "$$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$$VENV/bin/python" -m ensurepip >/dev/null 2>&1 && exit 0
  echo "$$VENV has no pip: remove the folder and say make again" >&2; exit 1
fi
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
for candidate in $${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
  if "$$candidate" -c "$$new_enough" >/dev/null 2>&1; then python=$$candidate; break; fi
done
if [ -z "$${python:-}" ]; then
  echo "anchor_nb needs Python 3.11 or later; $${PYTHON:-python3} is not. On Debian or Ubuntu: apt-get install python3 python3-venv; or say make PYTHON=/path/to/python3" >&2; exit 1
fi
version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
echo "== making $$VENV with $$python (Python $$version)"
if "$$python" -c 'import ensurepip, venv' 2>/dev/null && "$$python" -m venv "$$VENV"; then exit 0; fi
rm -rf "$$VENV"
if "$$python" -m virtualenv --version >/dev/null 2>&1; then exec "$$python" -m virtualenv --quiet "$$VENV"; fi
if "$$python" -m pip --version >/dev/null 2>&1 && "$$python" -c 'import venv' 2>/dev/null; then
  "$$python" -m venv --without-pip "$$VENV" && "$$python" -m pip --python "$$VENV/bin/python" install --quiet pip && exit 0
  rm -rf "$$VENV"
fi
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "== this Python has no ensurepip: apt-get install python$$version-venv"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "python$$version-venv" >/dev/null
  exec "$$python" -m venv "$$VENV"
fi
echo "This Python cannot make virtual environments. Run: sudo apt-get install python$$version-venv, then the same make again." >&2; exit 1
endef
export make_venv
