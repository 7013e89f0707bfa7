#!/usr/bin/env bash
# What `make test-hub` does: a Slurm, two users and a copy of the course that they can read, `make hub` in it, and
# tests/hub with Chromium; then all of it is taken away again.
#   test_hub.sh PYTHON [arguments for pytest]
# Where that cannot be had it says so in one line and is content: that is no fault of the course.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
python=$1
shift

without() {
  echo "Hub tests not run: $1."
  exit 0
}
as_nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups env -C / "$@" 2>/dev/null; }

[[ $(id -u) == 0 ]] || without "only root can make users, and start their servers"
for tool in useradd userdel chpasswd runuser setpriv; do
  command -v "$tool" >/dev/null || without "there is no $tool"
done
why=$(tools/find_slurm.sh) || without "$why"
DLOJZ_BROWSER=$(tools/find_browser.sh) || without "$DLOJZ_BROWSER"

# trainees need a Python that they can run: not one in root's home. The course's packages go with the same version alone
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for theirs in "$("$python" -c 'import sys; print(sys._base_executable)')" "/usr/bin/python$minor" ""; do
  [[ -n $theirs ]] || without "there is no Python $minor that all users can run"
  as_nobody "$theirs" -c pass && break
done
if ! "$theirs" -c 'import ensurepip' 2>/dev/null; then
  DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -q --no-install-recommends "python$minor-venv" >/dev/null 2>&1 ||
    without "$theirs has no venv, and apt-get cannot install it"
fi

DLOJZ_SCREENS=$PWD/build/browser-hub
rm -rf "$DLOJZ_SCREENS"
# a folder that all may pass through; its name, as for `make test-browser`, is in the arguments or the environment of all that is started
DLOJZ_HUB=$(mktemp -d /tmp/dlojz-hub-XXXXXX)
chmod 711 "$DLOJZ_HUB"
export DLOJZ_BROWSER DLOJZ_SCREENS DLOJZ_HUB SLURM_TEST_DIR=$DLOJZ_HUB/slurm SLURM_TEST_USERS=1 SLURM_TEST_GPUS=1
users=("tp-anna-$$" "tp-ben-$$")
finish() {
  local status=$? user
  trap - EXIT
  if ((status)); then
    mkdir -p "$DLOJZ_SCREENS"
    for user in "${users[@]}"; do
      cp "$DLOJZ_HUB/homes/$user/dlojz-hub.log" "$DLOJZ_SCREENS/${user%-*}.log" 2>/dev/null || true
    done
    cp "$DLOJZ_HUB/hub.log" "$DLOJZ_SCREENS/" 2>/dev/null && echo "what the hub and the servers said: $DLOJZ_SCREENS/*.log"
  fi
  tools/slurm_local.sh stop
  "$python" -m tests.browser.traces "$DLOJZ_HUB" || status=1
  for user in "${users[@]}"; do
    if pgrep -u "$user" >/dev/null 2>&1; then
      echo "left behind by $user: $(pgrep -au "$user")"
      pkill -9 -u "$user" || true
      status=1
    fi
    find /tmp /dev/shm -xdev -user "$user" -not -path "$DLOJZ_HUB/*" -delete 2>/dev/null || true
    userdel "$user" >/dev/null 2>&1 || true
  done
  rm -rf "$DLOJZ_HUB"
  exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

mkdir "$DLOJZ_HUB"/{course,homes,tmp}
for user in "${users[@]}"; do
  useradd --create-home --home-dir "$DLOJZ_HUB/homes/$user" --shell /bin/bash "$user"
  (umask 077 && echo "$user:$(head -c 12 /dev/urandom | base64)" >>"$DLOJZ_HUB/passwords")
done
chpasswd <"$DLOJZ_HUB/passwords"

# the course, as one finds it after `make data`, with the packages of this one
course=$DLOJZ_HUB/course
tar --create --exclude='./.git' --exclude='./.venv*' --exclude=./data --exclude=./work --exclude=./build . | tar --extract --no-same-owner -C "$course"
cp -rL "${DLOJZ_DATA:-data}" "$course/data"
"$theirs" -m venv "$course/.venv"
packages=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").origin.removesuffix("/torch/__init__.py"))')
prefix=${packages%/lib/*}
if ! as_nobody test -r "$packages/torch/__init__.py"; then
  cp -al "$packages" "$course/packages" 2>/dev/null || cp -a "$packages" "$course/packages"
  packages=$course/packages
fi
own=$("$course/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$packages')" >"$own/course.pth"
mkdir -p "$course/.venv"/{etc,share}
for folder in etc share; do cp -r "$prefix/$folder/jupyter" "$course/.venv/$folder/"; done
touch "$course/.venv/.installed"
chmod -R a+rX "$course"

settings=$(tools/slurm_local.sh start)
eval "$settings"
# --foreground: Ctrl-C reaches the tests
TMPDIR=$DLOJZ_HUB/tmp timeout --foreground 900 "$python" -m pytest -p tests.browser.screens --tb=short --durations 8 tests/hub "$@"
