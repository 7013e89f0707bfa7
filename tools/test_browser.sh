#!/usr/bin/env bash
# What `make test-browser` does: get Chromium where that is possible, run tests/browser with it, leave nothing behind.
#   test_browser.sh PYTHON [arguments for pytest]
# Where Chromium cannot be installed it says so in one line and is content: that is no fault of the course.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

DLOJZ_BROWSER=$(tools/find_browser.sh) || { echo "Browser tests not run: $DLOJZ_BROWSER."; exit 0; }
DLOJZ_SCREENS=$PWD/build/browser
rm -rf "$DLOJZ_SCREENS"

# the name of this folder is in the environment of all that the tests start
folder=$(mktemp -d "${TMPDIR:-/tmp}/dlojz-browser-XXXXXX")
finish() {
  local status=$?
  trap - EXIT
  "$python" -m tests.browser.traces "$folder" || status=1
  rm -rf "$folder"
  exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM
export DLOJZ_BROWSER DLOJZ_SCREENS
# two at once: each waits for a browser half of its time. --foreground: Ctrl-C reaches the tests
TMPDIR=$folder DLOJZ_RUN=$folder timeout --foreground 1800 "$python" -m pytest --timeout 600 -p tests.browser.screens -n 2 --dist loadfile --tb=short --durations 8 tests/browser "$@"
