#!/usr/bin/env bash
# find_browser.sh: prints where Chromium is; installs it where that is possible (as root, by apt).
# Where it is not: exit status 1, and the reason in half a sentence.
set -euo pipefail

for name in ${DLOJZ_BROWSER:+"$DLOJZ_BROWSER"} chromium chromium-browser google-chrome; do
  # a name alone says little: with some systems it is a page on where to get the program
  if found=$(command -v "$name") && timeout 30 "$found" --version >/dev/null 2>&1; then
    echo "$found"
    exit
  fi
done
sorry() {
  echo "Chromium is not installed, and $1"
  exit 1
}
[[ -z ${DLOJZ_BROWSER_TRIED:-} ]] || sorry "apt-get did not bring it"
[[ $(id -u) == 0 ]] || sorry "only root may install it"
command -v apt-get >/dev/null || sorry "this system has no apt-get"
echo "installing chromium ..." >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
install=(timeout 600 apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core)
# the lists of packages may be old, or not there at all
"${install[@]}" >"$log" 2>&1 || { timeout 300 apt-get update -q && "${install[@]}"; } >"$log" 2>&1 ||
  sorry "apt-get cannot install it: $(grep -m1 '^E:' "$log" || tail -n1 "$log")"
DLOJZ_BROWSER_TRIED=1 "$0"
