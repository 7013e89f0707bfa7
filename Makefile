# Two commands matter: make lab, make test. The rest is for authors.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
SETS   := $(if $(DLOJZ_DATA),$(DLOJZ_DATA),data)
IMAGES := $(SETS)/photo_patches/manifest.json
TEXT   := $(SETS)/code_text/manifest.json
WORKERS ?= 2
DATA   := $(IMAGES) $(TEXT)

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help lab test test-slurm notebooks solutions lint bench gpu doctor env data clean

help:
	@echo "make lab        install, make the data, open JupyterLab in work/"
	@echo "make test       install and run every test and every notebook"
	@echo "make test-slurm start a Slurm of its own here and run the tests that need one (installs it, as root)"
	@echo "make notebooks  write the trainee notebooks from solutions/*.py"
	@echo "make solutions  execute the solutions whose source changed"
	@echo "make lint       ruff"
	@echo "make bench      side-by-side races, written to benchmarks/results/"
	@echo "make gpu        on a machine with a GPU: all solutions at full size, figures recorded, the tests that need one"
	@echo "make doctor     what this machine offers the course"

env: $(STAMP)
data: $(DATA)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "The course needs Python 3.11 or later: make PYTHON=python3.11 ..." >&2; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[lab,dev,webdataset]'
	@touch $(STAMP)

$(IMAGES): | $(STAMP)
	$(RUN) data_scripts/make_photo_patches.py

$(TEXT): | $(STAMP)
	$(RUN) data_scripts/make_code_text.py

lab: $(STAMP) $(DATA)
	@$(RUN) -m dlojz_tp lab $(ARGS)

# tests and notebooks together, two workers (WORKERS=n), each file in one of them
test: $(STAMP) $(DATA)
	@start=$$(date +%s); \
	$(RUN) -m pytest tests solutions notebooks --nbval-lax --nbval-current-env --nbval-cell-timeout 280 \
	  -n $(WORKERS) --dist loadfile --durations 12; \
	status=$$?; echo "make test took $$(($$(date +%s) - start)) s"; exit $$status

test-slurm: $(STAMP)
	@start=$$(date +%s); tools/test_slurm.sh $(RUN); \
	status=$$?; echo "make test-slurm took $$(($$(date +%s) - start)) s"; exit $$status

notebooks: $(STAMP)
	@$(RUN) -m dlojz_tp build

solutions: $(STAMP) $(DATA)
	@$(RUN) -m dlojz_tp build --solutions

lint: $(STAMP)
	$(VENV)/bin/ruff check .

bench: $(STAMP)
	$(RUN) benchmarks/launch.py

# ONLY="04_profiler 06_compile" runs these alone
gpu: $(STAMP) $(DATA)
	@status=0; $(RUN) -m dlojz_tp record $(ONLY) || status=$$?; \
	$(RUN) -m pytest tests -m gpu || status=$$?; exit $$status

doctor: $(STAMP)
	@$(RUN) -m dlojz_tp doctor

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
