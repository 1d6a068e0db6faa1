# make book   the whole book: set up, run every notebook, build the site
# make test   style, unit, book and browser tests (builds the book first where it is out of date)
# make lab    the notebooks in JupyterLab
# make bench  the engine's speed beside a plain search, into book/benchmarks.md (about a quarter of an hour)
# make clean  remove everything that these made
#
# make assignments                 a zip of every assignment, for students, into _build/assignments
# make grade SUBMISSIONS=folder    grade folder/STUDENT/*.ipynb into folder-graded: grades.csv, feedback
# make formgrade SUBMISSIONS=...   grade by hand what tests cannot, in a browser; then make grade again
#
# make book MODEL=google-bert/bert-base-uncased REVIEWS=stanfordnlp/imdb   the book on other words and reviews
# make book LLM=some/instruct-model                                        with a language model's answers in "One word"
# make PYTHON=python3.12 ...                                               with a Python of your choice

SHELL = /bin/sh
BIN = .venv/bin
SITE = _build/html/index.html
SETTINGS = _build/settings

# What the site is made of. Anything here that is newer than the site makes `make book` build again.
SOURCES = _config.yml _toc.yml $(wildcard book/*.* book/_ext/*.py book/_static/*.* notebooks/*.ipynb \
    notebooks/assignments/*.ipynb wslib/*.py)

MODEL = packaged
REVIEWS = packaged
LLM =
export WSLIB_MODEL = $(MODEL)
export WSLIB_REVIEWS = $(REVIEWS)
export WSLIB_LLM = $(LLM)
# The packaged model and reviews need no network, so nothing is to be looked for there.
ifeq ($(MODEL)$(REVIEWS)$(LLM),packagedpackaged)
export HF_HUB_OFFLINE = 1
endif

# Without ipywidgets a progress bar is text; tqdm need not say so at the head of every notebook.
export PYTHONWARNINGS = ignore:IProgress not found

# A build that failed leaves no site behind that looks finished.
.DELETE_ON_ERROR:

.PHONY: help book test lab bench clean assignments grade formgrade FORCE

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

book: $(SITE)
	@echo
	@echo "The book is in $(SITE). Open that file in a browser, no server and no network needed:"
	@echo "    file://$(CURDIR)/$(SITE)"

$(SITE): .venv/ready $(SETTINGS) $(SOURCES)
	@rm -rf _build/html _build/.doctrees _build/jupyter_execute
	$(BIN)/jupyter-book build . --all -W --keep-going -n
	@touch $(SITE)

# Holds the models and the reviews of the last build; rewritten, and so newer than the site, only when they change.
$(SETTINGS): FORCE
	@mkdir -p _build
	@echo "$(MODEL) $(REVIEWS) $(LLM)" | cmp -s - $@ || echo "$(MODEL) $(REVIEWS) $(LLM)" > $@

test: $(SITE) .venv-nbgrader/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify --keep-id $(wildcard notebooks/*.ipynb notebooks/assignments/*.ipynb)
	$(BIN)/python -m pytest

lab: .venv/ready
	$(BIN)/jupyter lab --notebook-dir=notebooks

# Rewrites book/benchmarks.md: run it on a machine that does nothing else.
bench: .venv/ready
	$(BIN)/python tests/bench.py

COURSEWORK = .venv-nbgrader/bin/python -W ignore notebooks/assignments/coursework.py
# Beside the submissions, and so safe from `make clean`: the scores given by hand are kept there.
GRADED = $(SUBMISSIONS:%/=%)-graded
# Seconds that one cell of a submission may take.
TIMEOUT = 60

assignments: .venv-nbgrader/ready
	@$(COURSEWORK) release _build/assignments

grade: .venv-nbgrader/ready
	@test -n "$(SUBMISSIONS)" || { echo "Say where they are: make grade SUBMISSIONS=folder" >&2; exit 1; }
	@$(COURSEWORK) grade "$(SUBMISSIONS)" "$(GRADED)" $(TIMEOUT)

formgrade: .venv-nbgrader/ready
	@test -d "$(GRADED)/course" || { echo "First: make grade SUBMISSIONS=folder" >&2; exit 1; }
	cd "$(GRADED)/course" && "$(CURDIR)/.venv-nbgrader/bin/jupyter" lab --LabApp.default_url=/formgrader

clean:
	rm -rf .venv .venv-nbgrader _build book/assignments .pytest_cache .ruff_cache wslib.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The virtual environment, made again where the requirements have changed. Without PYTHON=..., the first that fits is
# taken: the python3 of macOS, for one, is too old.
.venv/ready: requirements.txt pyproject.toml
	@python=; for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "This book needs Python 3.11, 3.12 or 3.13, but found none as $(or $(PYTHON),python3 python3.13 python3.12 python3.11)." >&2; \
	    echo "Here, python3 is: $$(python3 --version 2>&1)." >&2; \
	    echo "Install one and name it: make PYTHON=/path/to/python3.12 $(or $(MAKECMDGOALS),book)" >&2; exit 1; \
	fi; \
	echo "Setting up .venv with $$($$python --version), once; this downloads a few hundred megabytes"; \
	$$python -m venv .venv || { echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

# nbgrader in an environment of its own. Its kernel python3 is put in place last: that of the book, so that notebooks
# are graded where they would be run.
.venv-nbgrader/ready: .venv/ready requirements-nbgrader.txt
	@echo "Setting up .venv-nbgrader, once; this downloads a hundred megabytes"
	$(BIN)/python -m venv .venv-nbgrader
	.venv-nbgrader/bin/python -m pip install --disable-pip-version-check -r requirements-nbgrader.txt
	$(BIN)/python -m ipykernel install --prefix .venv-nbgrader --name python3
	@touch $@
