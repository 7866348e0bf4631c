# Needs nothing beforehand but Python >= 3.11 (with venv) and make. `make PYTHON=python3.12 test` chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# One package: its tests, and the examples in its docstrings.
ROOM ?=
ROOM_PATHS = $(if $(ROOM),$(or $(wildcard tests/$(ROOM) tests/test_$(ROOM).py perada/$(ROOM) perada/$(ROOM).py),$(error \
  ROOM=$(ROOM) is not a package; choose one of $(notdir $(patsubst %/__init__.py,%,$(wildcard perada/*/__init__.py))))))
# Not with --quiet, which would keep warnings from being errors.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
# A part of the fault campaign, which takes an hour as a whole: under a minute on two idle cores.
INTERRUPTED_RUNS := $(BIN)/python -m benchmarks faults --quick --draws 3 --rows interruptions
comma := ,

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help quickstart deploy-demo test test-all slurm bench gpu check docs format surface tables commands dist matrix audit sbom lock clean

help:
	@echo "make quickstart  set up .venv and compare seven methods on 12 hospitals (recipes/hospitals.yaml)"
	@echo "make deploy-demo set up .venv and run three sites on this machine over Flower"
	@echo "make test        set up .venv and run the quick tests; of one package: make test ROOM=engine"
	@echo "make test-all    the slow tests too"
	@echo "make check       formatting, lint, types, documentation, tests about the repository, and some runs that are interrupted"
	@echo "make docs        the documentation as a site, in site/"
	@echo "make format      rewrite the files as \`make check\` wants them"
	@echo "make surface     rewrite docs/api.md, the page of what is promised"
	@echo "make tables      rewrite the generated tables of the documentation"
	@echo "make commands    rewrite perada/cli/commands.json: help texts and options of all commands"
	@echo "make bench       speed and memory: runs benchmarks/"
	@echo "make gpu         half an hour on one GPU: tests, speed, evidence (installs nothing; DEVICE=cpu QUICK=1 is the dry run)"
	@echo "make dist        the sdist and the wheel of the last commit, in dist/ (needs network)"
	@echo "make matrix      the wheel with the lowest and the newest dependencies: make matrix PYTHONS='python3.11 python3.13'"
	@echo "make audit       known vulnerabilities of the installed packages (needs network)"
	@echo "make sbom        software bill of materials, in dist/sbom.json"
	@echo "make lock        versions and hashes of all dependencies, in dist/requirements*.txt"
	@echo "make clean       remove .venv, builds and caches"

# A set-up that was interrupted leaves .venv/.building (or no working pip) behind: the next one starts from nothing.
# An environment without either mark is somebody's own, and is installed into.
define set_up
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "perada needs Python >= 3.11 and $(PYTHON) is not: name another with make PYTHON=python3.11 ..." >&2; exit 1; }
	@if [ -e $(VENV)/.building ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(VENV)/.building
	@echo "Installing into $(VENV): this takes some minutes the first time, for torch is large"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '$(1)'
	@rm -f $(VENV)/.building && touch $@
endef

$(VENV)/.installed: pyproject.toml
	$(call set_up,.[examples])

$(VENV)/.installed-dev: pyproject.toml
	$(call set_up,.[dev$(comma)docs])

$(VENV)/.installed-flower: pyproject.toml
	$(call set_up,.[flower$(comma)examples])

# The packages that only slow tests ask for. Flower takes older versions of some that `make test` has.
$(VENV)/.installed-all: pyproject.toml
	$(call set_up,.[dev$(comma)docs$(comma)flower$(comma)loggers])

# One thread: its batches are small, and threads that wait for one another on a busy machine cost more than they give.
# The instructions that every x86-64 processor of the last ten years has, so that all of them print the same digits.
ifeq ($(shell uname -m),x86_64)
SAME_DIGITS := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE
endif

quickstart: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(SAME_DIGITS) $(BIN)/perada compare hospitals --jobs 2

deploy-demo: $(VENV)/.installed-flower
	OMP_NUM_THREADS=1 $(BIN)/perada deploy demo

# Tests read nothing from a hub: a name that is not on this machine fails at once instead of after retries. Their models
# are so small that processes of one thread each are much faster than one process of several threads. One more than there
# are cores, as some tests wait for disks, other processes and deadlines.
TEST_PROCESSES ?= 3
test test-all check: export HF_HUB_OFFLINE = 1
test test-all check: export OMP_NUM_THREADS = 1
# Tests start many processes, which need not compile perada each, whatever the environment says.
test test-all: export PYTHONDONTWRITEBYTECODE =

# Tests about this repository instead of the library: they fail when a page, a list or a benchmark is not up to date. A
# change of the library's code breaks them last, so `make check` runs them.
REPOSITORY_TESTS := $(addprefix tests/test_,architecture.py benchmarks.py doc_pages.py docs_site.py gpu_parts.py house.py \
  mutants.py packaging.py peers.py public_files.py reference.py surface.py)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(REPOSITORY_TESTS:%=--ignore=%) $(PYTEST_ARGS) $(ROOM_PATHS)

test-all: $(VENV)/.installed-all
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "" $(PYTEST_ARGS) $(ROOM_PATHS)

# Slurm, without which `make test-all` skips the tests of clusters.
slurm:
	sudo apt-get update
	sudo apt-get install --yes --no-install-recommends slurm-wlm munge

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -qq -n $(TEST_PROCESSES) --dist worksteal $(REPOSITORY_TESTS)
	$(MKDOCS)
	$(INTERRUPTED_RUNS)

docs: $(VENV)/.installed-dev
	$(MKDOCS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

surface: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m tests.surface_page

tables: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m tests.doc_tables

commands: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m perada.cli.describe

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

# Sets nothing up, since a machine with a GPU often has no network: the runner says which packages are missing, and what
# cannot be run without them. `make gpu OUTPUT=FOLDER FASHION_MNIST=FOLDER GPU_ARGS=--list`.
DEVICE ?= cuda
gpu: export HF_HUB_OFFLINE = 1
gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu --device $(DEVICE) $(if $(QUICK),--quick) \
	  $(if $(OUTPUT),--output '$(OUTPUT)') $(if $(FASHION_MNIST),--fashion-mnist '$(FASHION_MNIST)') $(GPU_ARGS)

# --strict: a package that cannot be looked up is an error, not a pass. The tools have an environment of their own, so that what they need is not audited, nor changed here.
$(VENV)-tools/.installed: Makefile
	$(PYTHON) -m venv $(VENV)-tools
	$(VENV)-tools/bin/python -m pip install --disable-pip-version-check --quiet 'pip-audit>=2.9,<3' 'cyclonedx-bom>=7,<8' 'uv>=0.9,<1' \
	  'twine>=6.2' 'build==1.6.1' 'setuptools==84.2.1'  # the last two: their versions decide the bytes of `make dist`
	@touch $@

# Of the last commit, not of the folder: git makes the tree, and its time is that of the commit.
dist: $(VENV)-tools/.installed
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); [ "$${TAG:-v$$version}" = "v$$version" ] || { \
	  echo "the tag $$TAG is not v$$version, the version in pyproject.toml: change one of them" >&2; exit 1; }
	@rm -rf dist/perada-* build/tree && mkdir -p dist build/tree
	git archive HEAD | tar -x -C build/tree
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(VENV)-tools/bin/python .ci/dist.py build/tree dist
	$(VENV)-tools/bin/twine check --strict dist/perada-*
	@cd dist && sha256sum perada-*

PYTHONS ?= $(PYTHON)
matrix: dist
	tests/matrix.sh dist/perada-*.whl $(PYTHONS)

audit: $(VENV)/.installed $(VENV)-tools/.installed
	@$(BIN)/python -m pip list --format=freeze --exclude-editable > $(VENV)-tools/packages.txt
	@$(VENV)-tools/bin/pip-audit --strict --disable-pip --no-deps -r $(VENV)-tools/packages.txt || { \
	  echo "make audit: vulnerabilities were found, or the service that lists them could not be reached (see above)" >&2; exit 1; }

sbom: $(VENV)/.installed $(VENV)-tools/.installed
	@mkdir -p dist
	$(VENV)-tools/bin/cyclonedx-py environment --output-file dist/sbom.json $(BIN)/python

# pip install --require-hashes -r dist/requirements.txt installs the very files that a release was tested with.
lock: $(VENV)-tools/.installed
	@mkdir -p dist
	$(VENV)-tools/bin/uv pip compile pyproject.toml --extra examples --extra privacy --universal --generate-hashes --quiet --output-file dist/requirements.txt
	$(VENV)-tools/bin/uv pip compile pyproject.toml --extra flower --extra privacy --extra monitoring --extra examples --universal --generate-hashes --quiet --output-file dist/requirements-flower.txt

clean:
	rm -rf $(VENV) $(VENV)-tools build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
