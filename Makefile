# Two commands matter: make lab, make test. The rest is for authors.
PYTHON ?= python3
VENV   ?= .venv
# A folder may have a space in its name: names in rules need a backslash there, commands need quotes
SPACE  := $(subst x,,x x)
named   = $(subst $(SPACE),\ ,$(1))
RUN    := "$(VENV)/bin/python"
STAMP  := $(call named,$(VENV))/.installed
DEV    := $(STAMP)-dev
# DeepSpeed, Accelerate, Fabric, transformers and what deploys a network in an environment of their own, which sees all of the first: trainees need none of them
FRAMES := $(VENV)-frameworks
FRUN   := "$(FRAMES)/bin/python"
FRAMED := $(call named,$(FRAMES))/.installed
# JupyterHub: likewise, with the course's own Python for the notebooks' kernels
HUB    := $(VENV)-hub
HRUN   := "$(HUB)/bin/python"
HUBBED := $(call named,$(HUB))/.installed
# what drives a browser, for tests
BROWSED := $(STAMP)-browser
SETS   := $(if $(DLOJZ_DATA),$(DLOJZ_DATA),data)
IMAGES := $(call named,$(SETS))/photo_patches/manifest.json
TEXT   := $(call named,$(SETS))/code_text/manifest.json
TABLE  := $(call named,$(SETS))/search_table/manifest.json
CELLS  := $(call named,$(SETS))/photo_cells/manifest.json
NET    := $(call named,$(SETS))/pretrained/manifest.json
WORKERS ?= 2
DATA   := $(IMAGES) $(TEXT) $(TABLE) $(CELLS) $(NET)
# each file in one of the workers (WORKERS=n)
TESTS  := -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout 280 -n $(WORKERS) --dist loadfile --durations 12
PYTEST := $(RUN) $(TESTS)
# an install that belongs to somebody else: nothing is written there
OTHERS := $(shell test -w "$(VENV)" || { test ! -e "$(VENV)" && test -w "$$(dirname "$(VENV)")"; } || echo yes)
ASK    = { echo "$(CURDIR) is not yours to write in, and $@ is missing: ask whoever installed the course$(1)" >&2; exit 1; }
# pip's progress bar where somebody looks at it
PIP    := $(RUN) -m pip install $(shell test -t 2 || echo --quiet) --editable

# lets an environment see the packages of the one whose folder it is told
define SEES
import sys, sysconfig
open(sysconfig.get_path("purelib") + "/course.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})\n")
endef
export SEES
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help lab hub test test-all test-avx2 test-frameworks test-slurm test-browser test-hub minutes notebooks solutions trainee-kit lint bench gpu doctor env data clean

help:
	@echo "make lab        install, make the data, open JupyterLab in work/ (LEVEL=open: write each balise from its names alone)"
	@echo "make data       install and make the data sets, open nothing: for an installation that others share"
	@echo "make hub        install JupyterHub beside, and serve the course with it to the users of this machine"
	@echo "make test       install and run the tests and the notebooks; those that passed here are left out while nothing"
	@echo "                that they depend on changes"
	@echo "make test-all   install and run every test and every notebook"
	@echo "make test-avx2  the solution notebooks and the tests that depend on it, on a processor held to AVX2"
	@echo "make test-frameworks  install DeepSpeed, Accelerate, Fabric, ONNX Runtime and transformers beside, and test what needs them"
	@echo "make test-slurm start a Slurm of its own here and run the tests that need one (installs it, as root)"
	@echo "make test-browser  JupyterLab in Chromium, as a trainee sees it (installs it, as root)"
	@echo "make test-hub   two trainees at once on a JupyterHub here, over a Slurm, in Chromium (as root)"
	@echo "make minutes    how long each practical work and its core take, counted; written into headings, README and plans"
	@echo "make notebooks  write the trainee notebooks from solutions/*.py"
	@echo "make solutions  execute the solutions whose source changed"
	@echo "make trainee-kit  build/dlojz-tp-kit.tar: notebooks, package and data, without solutions and tests"
	@echo "make lint       ruff"
	@echo "make bench      side-by-side races, written to benchmarks/results/"
	@echo "make gpu        on a machine with a GPU: all solutions at full size, figures recorded, the tests that need one"
	@echo "make doctor     what this machine offers the course"

env: $(STAMP)
data: $(DATA)

ifdef OTHERS
$(STAMP) $(DEV) $(FRAMED) $(HUBBED) $(BROWSED):
	@$(call ASK, to run make $(if $(findstring dev,$@),test,data))
else
$(STAMP): pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "The course needs Python 3.11 to 3.13: make PYTHON=python3.11 ..." >&2; exit 1; }
	test -x $(RUN) || "$(PYTHON)" -m venv "$(VENV)"
	$(PIP) '.[lab,webdataset]'
	@touch "$@"

# what authors and tests need beside, so that no tool of theirs is in a trainee's JupyterLab
$(DEV): $(STAMP)
	$(PIP) '.[dev]'
	@touch "$@"

$(BROWSED): $(DEV)
	$(PIP) '.[browser]'
	@touch "$@"

$(FRAMED): $(DEV)
	$(RUN) -m venv --clear "$(FRAMES)"
	@$(FRUN) -c "$$SEES" "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(FRUN) -m pip install $(shell test -t 2 || echo --quiet) --editable '.[frameworks,deploy,inference]'
	@$(FRUN) -c 'from dlojz_tp import frameworks; frameworks.need(*frameworks.NAMES, *frameworks.DEPLOY, *frameworks.INFERENCE)'
	@touch "$@"

$(HUBBED): $(STAMP)
	$(RUN) -m venv --clear "$(HUB)"
	@$(HRUN) -c "$$SEES" "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(HRUN) -m pip install $(shell test -t 2 || echo --quiet) --editable '.[hub]'
	$(RUN) -m ipykernel install --prefix "$(HUB)" >/dev/null
	@touch "$@"
endif

ifeq ($(if $(DLOJZ_DATA),,$(OTHERS)),yes)
$(DATA):
	@$(call ASK, to run make data; or set DLOJZ_DATA to a folder of yours)
else
$(IMAGES): | $(STAMP)
	$(RUN) data_scripts/make_photo_patches.py

$(TEXT): | $(STAMP)
	$(RUN) data_scripts/make_code_text.py

$(TABLE): | $(STAMP)
	$(RUN) data_scripts/make_search_table.py

$(CELLS): | $(STAMP)
	$(RUN) data_scripts/make_photo_cells.py

$(NET): | $(STAMP)
	$(RUN) data_scripts/make_pretrained.py
endif

lab: $(STAMP) $(DATA)
	@$(RUN) -m dlojz_tp lab $(if $(LEVEL),--level $(LEVEL)) $(ARGS)

# SITE=file: what your place has, see deploy/site.toml
hub: $(HUBBED) $(DATA)
	@DLOJZ_SITE="$(SITE)" "$$(realpath --no-symlinks $(HRUN))" -m jupyterhub -f deploy/jupyterhub_config.py

# tests and notebooks together; the first leaves out what passed here before
test: SKIPS = --skip-unchanged
test test-all: $(DEV) $(DATA)
	@start=$$(date +%s); $(PYTEST) $(SKIPS) tests solutions notebooks; \
	status=$$?; echo "make $@ took $$(($$(date +%s) - start)) s"; exit $$status

# what most laptops have: no bfloat16 in the processor. It matters to solutions that compute in less than float32, they
# or their checks, and to those that train as the course does, in what pays here
HALF  := torch\.(bfloat16|float16)|autocast|fast_dtype|training_run
HALVES = $(shell for work in solutions/[0-9]*.py; do \
  grep -qrE --include=*.py '$(HALF)' $$work dlojz_tp/checks/$$(basename $$work .py | cut -d_ -f2-) && echo $${work%.py}.ipynb; done)
test-avx2: $(DEV) $(DATA)
	@start=$$(date +%s); \
	ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) tests/test_precision.py tests/test_measure_memory.py $(or $(ONLY),$(HALVES)); \
	status=$$?; echo "make test-avx2 took $$(($$(date +%s) - start)) s"; exit $$status

# the answers to balises that need one of them; 14, 16, 20, 21, 22 and 23 run with them in their solutions
WITH   := solutions/14_fsdp.ipynb solutions/16_pipeline_schedules.ipynb solutions/20_deepspeed_and_friends.ipynb \
          notebooks/20_deepspeed_and_friends.ipynb solutions/21_fine_tuning.ipynb \
          solutions/22_compression.ipynb solutions/23_inference.ipynb
NEEDED := ipynb or test_frameworks or test_transformers or schedules-6 or _and_friends and not friends-1 and not friends-4 and not friends-5
test-frameworks: $(FRAMED) $(DATA)
	@start=$$(date +%s); $(FRUN) $(TESTS) tests/test_frameworks.py tests/test_models_llama.py tests/test_answers.py $(WITH) -k "$(NEEDED)"; \
	status=$$?; echo "make $@ took $$(($$(date +%s) - start)) s"; exit $$status

test-slurm: $(DEV)
	@start=$$(date +%s); tools/test_slurm.sh $(RUN); \
	status=$$?; echo "make test-slurm took $$(($$(date +%s) - start)) s"; exit $$status

test-browser: $(BROWSED) $(DATA)
	@start=$$(date +%s); tools/test_browser.sh $(RUN); \
	status=$$?; echo "make test-browser took $$(($$(date +%s) - start)) s"; exit $$status

test-hub: $(BROWSED) $(DATA)
	@start=$$(date +%s); tools/test_hub.sh $(RUN); \
	status=$$?; echo "make test-hub took $$(($$(date +%s) - start)) s"; exit $$status

minutes: $(DEV)
	@$(RUN) -m dlojz_tp minutes

notebooks: $(FRAMED)
	@$(FRUN) -m dlojz_tp build

solutions: $(FRAMED) $(DATA)
	@$(FRUN) -m dlojz_tp build --solutions

trainee-kit: $(DATA)
	@tools/trainee_kit.sh build/dlojz-tp-kit.tar "$(SETS)"

lint: $(DEV)
	"$(VENV)/bin/ruff" check .

bench: $(STAMP)
	$(RUN) benchmarks/launch.py

# ONLY="04_profiler 06_compile" runs these alone
gpu: $(DEV) $(DATA)
	@status=0; $(RUN) -m dlojz_tp record $(ONLY) || status=$$?; \
	$(RUN) -m pytest tests -m gpu || status=$$?; exit $$status

doctor: $(STAMP)
	@$(RUN) -m dlojz_tp doctor

clean:
	rm -rf "$(VENV)" "$(FRAMES)" "$(HUB)" build dist .pytest_cache .ruff_cache
