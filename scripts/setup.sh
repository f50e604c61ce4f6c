# Sourced by the scripts beside it: brings the machine to where `.venv/bin/aof2` runs, and is quick when it already does.
# System packages come by apt when root; another user is told the one line to run.

set -euo pipefail
AOF2_TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
AOF2_VENV="$AOF2_TOP/.venv"

say() { printf 'aof2: %s\n' "$*" >&2; }

# Prints the first Python that is new enough and can make environments and compile extensions.
find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" - 2>/dev/null <<'PY'; then command -v "$candidate"; return 0; fi
import os, sys, sysconfig
import ensurepip, venv  # Debian ships these apart
sys.exit(sys.version_info < (3, 11) or not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
PY
  done
  return 1
}

missing_packages() {
  find_python >/dev/null || printf 'python3 python3-venv python3-dev '
  command -v gcc >/dev/null 2>&1 && echo 'int main(void){return 0;}' | gcc -x c - -o /dev/null 2>/dev/null || printf 'gcc libc6-dev '
  command -v pkg-config >/dev/null 2>&1 && pkg-config --exists fuse3 && command -v fusermount3 >/dev/null 2>&1 || printf 'libfuse3-dev fuse3 pkg-config '
  echo '#include <lmdb.h>' | gcc -E - >/dev/null 2>&1 || printf 'liblmdb-dev '
  echo '#include <openssl/sha.h>' | gcc -E - >/dev/null 2>&1 || printf 'libssl-dev '
}

missing_java() {
  local java
  java=$(java -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' || true)
  [ "${java:-0}" -ge 17 ] || printf 'default-jre-headless '
}

# What only tests use; those that need it are skipped where it is missing.
missing_test_packages() {
  missing_java
  command -v rsync >/dev/null 2>&1 || printf 'rsync '
  command -v make >/dev/null 2>&1 || printf 'make '
  command -v chromium >/dev/null 2>&1 || printf 'chromium '
  command -v bindfs >/dev/null 2>&1 || printf 'bindfs '
  # A server, which a machine that people work on need not have.
  [ -z "${CI:-}" ] || command -v nfs-cat >/dev/null 2>&1 || printf 'nfs-ganesha-vfs libnfs-utils '
}

install_system() {
  local packages for_tests=''
  packages=$(missing_packages)
  [ "$1" = spark ] && packages="$packages$(missing_java)"
  [ "$1" = dev ] && for_tests=$(missing_test_packages)
  if [ -z "$packages" ] && [ -n "$for_tests" ] && [ "$(id -u)" -ne 0 ]; then
    say "some tests will be skipped; for all of them run:  sudo apt-get install -y $for_tests"
    return 0
  fi
  packages="$packages$for_tests"
  [ -z "$packages" ] && return 0
  if [ "$(id -u)" -ne 0 ]; then
    say "system packages are missing; run:  sudo apt-get install -y $packages"
    exit 1
  fi
  say "installing $packages"
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive bash -c "apt-get update -q && apt-get install -qy --no-install-recommends $packages" >&2
}

# What the installed environment depends on: when none of it changed, there is nothing to do.
setup_stamp() {
  (cd "$AOF2_TOP" && cat pyproject.toml setup.py native/*.c native/*.h native/channel/*.[ch] native/build.py && find fs engine native -name __init__.py | sort) | cksum
}

# "dev" has everything that "bench" has.
project_is_current() {
  local now set_up
  [ -x "$AOF2_VENV/bin/aof2" ] || return 1
  now=$(setup_stamp)
  for set_up in "$1" dev; do
    if [ "$(cat "$AOF2_VENV/.aof2-$set_up" 2>/dev/null)" = "$now" ]; then return 0; fi
  done
  return 1
}

install_project() {
  local extras=$1 stamp="$AOF2_VENV/.aof2-$1"
  if project_is_current "$1"; then return 0; fi
  say "setting up $AOF2_VENV (once; again when the project's dependencies change)"
  [ -x "$AOF2_VENV/bin/python" ] || "$(find_python)" -m venv "$AOF2_VENV"
  "$AOF2_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$AOF2_TOP[$extras]" >&2
  setup_stamp >"$stamp"
}

setup() {
  install_system "$1"
  # Nothing to do is nothing to write: another user's tree serves, too.
  if project_is_current "$1"; then return 0; fi
  if [ ! -w "$AOF2_TOP" ]; then
    say "$AOF2_TOP is $(stat -c %U "$AOF2_TOP")'s and not set up; run:  sudo -u $(stat -c %U "$AOF2_TOP") $AOF2_TOP/scripts/aof2 --help"
    exit 1
  fi
  # Two scripts started together must not set up over each other.
  exec 9>"$AOF2_TOP/.setup.lock"
  flock 9
  install_project "$1"
  exec 9>&-
}
