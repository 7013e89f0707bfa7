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
# what builds the site
SITED  := $(STAMP)-site
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

# WHEELS=folder: what `make wheelhouse` has collected there, and no network
ifdef WHEELS
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(shell "$(PYTHON)" -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).resolve().as_uri())' "$(WHEELS)")
endif

.PHONY: help lab hub wheelhouse test test-all test-avx2 test-frameworks test-slurm test-browser test-hub test-versions minutes weight notebooks solutions slides site trainee-kit lint bench gpu rehearse doctor env env-tests env-frameworks env-browser data clean

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
	@echo "make test-versions  unit tests on each Python and PyTorch that is promised (PAIRS=\"3.11-2.11\": on this pair alone)"
	@echo "make minutes    how long each practical work and its core take, counted; written into headings, README and plans"
	@echo "make weight     lines, hints, answers and seconds of each practical work; tests/weight.toml has what they may be"
	@echo "make notebooks  write the trainee notebooks from solutions/*.py (ONLY=\"07 09\": of these works)"
	@echo "make solutions  execute the solutions whose source changed (ONLY=\"07 09\": of these works)"
	@echo "make slides     build/slides: reveal.js slides with notes, from the executed solutions (ONLY=\"08 13\": of these works)"
	@echo "make site       build/site: the course as pages to read, from the executed solutions, without a server or a network"
	@echo "                (SITE=trainee: in build/site-trainee, without answers and instructor's notes)"
	@echo "make trainee-kit  build/dlojz-tp-kit.tar: notebooks, package and data, without solutions and tests"
	@echo "make wheelhouse build/wheelhouse: all wheels, for a machine without a network (there: make lab WHEELS=build/wheelhouse)"
	@echo "make lint       ruff: its rules, and its format"
	@echo "make bench      side-by-side races, written to benchmarks/results/"
	@echo "make gpu        on a machine with a GPU: all solutions at full size, figures recorded, the tests that need one"
	@echo "                (MINUTES=9: the most useful works first, without the tests; the same command goes on)"
	@echo "make rehearse   all solutions on GPUs that are only pretended (1; 1, 2, 4 and 8 over ranks), at small size"
	@echo "make doctor     what this machine offers the course"

env: $(STAMP)
env-tests: $(DEV)
env-frameworks: $(FRAMED)
env-browser: $(BROWSED)
data: $(DATA)

ifdef OTHERS
$(STAMP) $(DEV) $(FRAMED) $(HUBBED) $(BROWSED) $(SITED):
	@$(call ASK, to run make $(if $(findstring dev,$@),test,data))
else
$(STAMP): pyproject.toml
	@case $$(uname -s) in Linux) ;; *) echo "The course is for Linux. Windows: run it in WSL 2 (wsl --install). macOS: nobody has tried it;" \
	  "docs/containers.md has a container, Colab and Kaggle." >&2; test "$$(uname -s)" = Darwin || exit 1;; esac
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "The course needs Python 3.11 to 3.13: make PYTHON=python3.11 ..." >&2; exit 1; }
	test -x $(RUN) || "$(PYTHON)" -m venv "$(VENV)"
	$(PIP) '.[lab,webdataset]'
	@touch "$@"

# what authors and tests need beside, so that no tool of theirs is in a trainee's JupyterLab
$(DEV): $(STAMP)
	$(PIP) '.[dev,slides]'
	@touch "$@"

$(BROWSED): $(DEV)
	$(PIP) '.[browser]'
	@touch "$@"

$(SITED): $(DEV)
	$(PIP) '.[site]'
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

# tests and notebooks together; the first leaves out what passed here before, ONCE=yes what test-frameworks runs as well;
# DLOJZ_TURN=k/12, as in CI, five sixths of the trainee notebooks: the solutions run the same given code
test: SKIPS = --skip-unchanged
test-all: SKIPS = $(addprefix --ignore ,$(if $(ONCE),$(filter solutions/%,$(WITH))) $(if $(DLOJZ_TURN),$(LATER)))
LATER = $(shell ls notebooks/[0-9]*.ipynb | awk -v turn=$(DLOJZ_TURN) '{split(turn, of, "/")} NR % 6 != of[1] % 6')
test test-all: $(DEV) $(DATA)
	@start=$$(date +%s); $(PYTEST) $(SKIPS) tests solutions notebooks; \
	status=$$?; echo "make $@ took $$(($$(date +%s) - start)) s"; exit $$status

# what most laptops have: no bfloat16 in the processor. It matters to solutions that compute in less than float32, and to
# those that train as the course does, in what pays here
HALF  := torch\.(bfloat16|float16)|autocast|fast_dtype|training_run
HALVES = $(shell grep -lE '$(HALF)' solutions/[0-9]*.py | sed 's/py$$/ipynb/' | awk -v turn=$${DLOJZ_TURN:-0/1} \
  '{split(turn, of, "/")} NR % of[2] == of[1]')
test-avx2: $(DEV) $(DATA)
	@if ! $(RUN) -c 'import sys, torch; sys.exit(not torch.backends.cpu.get_cpu_capability().startswith("AVX512"))'; then \
	  echo "AVX2 tests not run: this processor has no AVX-512, so make test-all has shown the same."; exit 0; fi; \
	start=$$(date +%s); \
	ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) tests/test_precision.py tests/test_measure_memory.py $(or $(ONLY),$(HALVES)); \
	status=$$?; echo "make test-avx2 took $$(($$(date +%s) - start)) s"; exit $$status

# the answers to balises that need one of them; 14, 16, 18, 20, 21, 22 and 23 run with them in their solutions
WITH   := solutions/14_fsdp.ipynb solutions/16_pipeline_schedules.ipynb solutions/20_deepspeed_and_friends.ipynb \
          notebooks/20_deepspeed_and_friends.ipynb solutions/21_fine_tuning.ipynb \
          solutions/22_compression.ipynb solutions/23_inference.ipynb solutions/18_long_sequences_and_experts.ipynb
NEEDED := ipynb or test_frameworks or test_transformers or schedules-6 or _and_friends and not friends-1 and not friends-4 and not friends-5
test-frameworks: $(FRAMED) $(DATA)
	@start=$$(date +%s); $(FRUN) $(TESTS) tests/test_frameworks.py tests/test_models_llama.py tests/test_answers.py $(WITH) -k "$(NEEDED)"; \
	status=$$?; echo "make $@ took $$(($$(date +%s) - start)) s"; exit $$status

test-slurm: $(DEV)
	@start=$$(date +%s); tools/test_slurm.sh $(RUN); \
	status=$$?; echo "make test-slurm took $$(($$(date +%s) - start)) s"; exit $$status

test-browser: $(BROWSED) $(SITED) $(DATA)
	@start=$$(date +%s); tools/test_browser.sh $(RUN); \
	status=$$?; echo "make test-browser took $$(($$(date +%s) - start)) s"; exit $$status

test-hub: $(BROWSED) $(DATA)
	@start=$$(date +%s); tools/test_hub.sh $(RUN); \
	status=$$?; echo "make test-hub took $$(($$(date +%s) - start)) s"; exit $$status

# the ends of the ranges that pyproject.toml promises
PAIRS ?= 3.11-2.11 3.11-2.14 3.13-2.11 3.13-2.14
test-versions: $(DATA)
	@start=$$(date +%s); WORKERS=$(WORKERS) tools/test_versions.sh $(PAIRS); \
	status=$$?; echo "make test-versions took $$(($$(date +%s) - start)) s"; exit $$status

minutes: $(DEV)
	@$(RUN) -m dlojz_tp minutes

weight: $(DEV)
	@$(RUN) -m dlojz_tp weight

# ONLY="07 09": these works alone, without the frameworks where none of them needs one
BUILT  := $(if $(and $(ONLY),$(if $(filter $(foreach one,$(ONLY),solutions/$(one).ipynb solutions/$(one)_%),$(WITH)),,none)),$(DEV),$(FRAMED))
BUILDS  = $(if $(filter $(DEV),$(BUILT)),$(RUN),$(FRUN)) -m dlojz_tp build $(ONLY)
notebooks: $(BUILT)
	@$(BUILDS)

solutions: $(BUILT) $(DATA)
	@$(BUILDS) --solutions

# ONLY="08 13" makes those of these works alone
slides: $(DEV)
	@$(RUN) -m dlojz_tp slides $(ONLY)

# for a machine without a network, with this Python and this processor; hatchling and editables put a checkout to use
wheelhouse: $(STAMP)
	$(RUN) -m pip wheel $(shell test -t 2 || echo --quiet) --wheel-dir build/wheelhouse '.[lab,webdataset,dev,slides]' hatchling editables
	@rm -f build/wheelhouse/dlojz_tp-*.whl
	@du -sh build/wheelhouse && echo "there: make lab WHEELS=build/wheelhouse"

# SITE=trainee: without answers
site: $(SITED)
	@$(RUN) -m dlojz_tp site $(if $(filter trainee,$(SITE)),--trainee)

trainee-kit: $(DATA)
	@tools/trainee_kit.sh build/dlojz-tp-kit.tar "$(SETS)"

lint: $(DEV)
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .

bench: $(STAMP)
	$(RUN) benchmarks/launch.py

# ONLY="04_profiler 06_compile" runs these alone; MINUTES=9 leaves the tests out, stops in time, and goes on when called again
gpu: $(DEV) $(DATA)
	@status=0; $(RUN) -m dlojz_tp record $(if $(MINUTES),--minutes $(MINUTES)) $(ONLY) || status=$$?; \
	$(if $(MINUTES),,$(RUN) -m pytest tests -m gpu || status=$$?;) exit $$status

# the solutions on GPUs that are only pretended: GPUS="1 4", ONLY="12_large_models"; SCALE=full: by shape; ONCE=yes: as CI does
rehearse: $(DEV) $(DATA)
	@$(RUN) -m dlojz_tp rehearse $(if $(GPUS),--gpus "$(GPUS)") $(if $(ONCE),--once) $(if $(filter full,$(SCALE)),--full) $(if $(MINUTES),--minutes "$(MINUTES)") --workers $(WORKERS) $(ONLY)

doctor: $(STAMP)
	@$(RUN) -m dlojz_tp doctor

clean:
	rm -rf "$(VENV)" "$(FRAMES)" "$(HUB)" .venv-[0-9]* build dist .pytest_cache .ruff_cache
