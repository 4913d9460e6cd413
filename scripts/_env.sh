# Sourced by the scripts beside it: finds Python, keeps .venv in step with pyproject.toml and constraints.txt.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
#   setup_env train                 # the extra of pyproject.toml to install
#   exec "$VENV_PYTHON" ...
#
# $PYTHON chooses the interpreter that .venv is made from (3.11 or newer), $SPMD_VENV another folder for it. What is
# installed is the checkout, or the wheel that $SPMD_WHEEL names.
# shellcheck shell=bash

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${SPMD_VENV:-$REPO_ROOT/.venv}"
VENV_PYTHON="$VENV/bin/python"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Prints "ok", "old VERSION" or "novenv VERSION" for an interpreter; prints nothing for one that does not run.
probe_python() {
  "$1" -c '
import importlib.util, sys
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 11):
    print("old", version)
elif not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    print("novenv", version)
else:
    print("ok", version)
' 2>/dev/null </dev/null || true
}

# Prints the first interpreter that can make the environment. A name on PATH may be a shim that fails, so each is run.
find_python() {
  local candidate verdict tried=""
  local candidates=(python3.12 python3.11 python3.13 python3.14 python3 python)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    verdict="$(probe_python "$candidate")"
    case "$verdict" in
      ok*) printf '%s\n' "$candidate"; return ;;
      old*) tried="$tried
  $candidate is Python ${verdict#old }: 3.11 or newer is needed" ;;
      novenv*) tried="$tried
  $candidate (${verdict#novenv }) lacks the venv or ensurepip module: on Debian and Ubuntu, apt install python3-venv" ;;
      *) if command -v "$candidate" >/dev/null; then tried="$tried
  $candidate does not run"; fi ;;
    esac
  done
  die "found no Python that can make a virtual environment.${tried:-
  none of these is on PATH: ${candidates[*]}}
Install Python 3.11 or newer, or name one: PYTHON=/path/to/python3.12 $0"
}

# Prints the interpreter of a version, as in 3.12: by its name on PATH, or one of pyenv's that is not switched on.
python_of() {
  local candidate
  for candidate in "python$1" "$(pyenv root 2>/dev/null || true)"/versions/"$1".*/bin/python; do
    case "$(probe_python "$candidate")" in ok*) printf '%s\n' "$candidate"; return ;; esac
  done
  die "found no Python $1: install it, so that python$1 is on PATH, or pyenv install $1"
}

# Everything that decides what an installation contains: the requirements, the pins, the interpreter.
# Called with the extra's name; prints a hash.
wanted_stamp() {
  (cd "$REPO_ROOT" && "$VENV_PYTHON" - "$1" <<'PY'
import hashlib, pathlib, sys
parts = [sys.argv[1], sys.version, sys.prefix]
parts += [pathlib.Path(name).read_text() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
  )
}

# Whether .venv already holds what the extra asks for.
is_current() {
  local stamp="$VENV/.stamp-$1" wanted
  [ -x "$VENV_PYTHON" ] && [ -f "$stamp" ] || return 1
  wanted="$(wanted_stamp "$1" 2>/dev/null)" && [ "$(cat "$stamp")" = "$wanted" ]
}

make_venv() {
  local python
  python="$(find_python)" || exit 1
  say "Making ${VENV##*/} with $("$python" --version 2>&1)."
  "$python" -m venv "$VENV" || die "could not make $VENV with $python."
}

install_extra() {
  local extra="$1" log what=(--editable ".[$1]")
  if [ -n "${SPMD_WHEEL:-}" ]; then what=("$SPMD_WHEEL[$extra]"); fi
  if is_current "$extra"; then return; fi # another script was faster
  # A dangling link (its Python was removed) is not executable either, and is remade in place.
  [ -x "$VENV_PYTHON" ] || make_venv
  case "$(probe_python "$VENV_PYTHON")" in
    old*) die "$VENV holds a Python older than 3.11: delete that folder and run again." ;;
    "") die "the Python in $VENV does not run: delete that folder and run again." ;;
  esac
  "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 ||
    "$VENV_PYTHON" -m ensurepip >/dev/null 2>&1 ||
    die "$VENV has no pip: delete that folder and run again."
  say "Installing spmd[$extra] into ${VENV##*/} (a few minutes the first time)."
  log="$(mktemp)"
  if ! (cd "$REPO_ROOT" && "$VENV_PYTHON" -m pip install --quiet --no-input --disable-pip-version-check \
      "${what[@]}" --constraint constraints.txt) >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    rm -f "$log"
    die "pip could not install spmd[$extra]: its messages are above."
  fi
  rm -f "$log"
  wanted_stamp "$extra" >"$VENV/.stamp-$extra"
}

# Whether the script that sources this is only asked what it does. What follows `--` is asked of another program.
asks_help=no
for word in "$@"; do
  case "$word" in
    --) break ;;
    --help | -h) asks_help=yes ;;
  esac
done

# Makes .venv and installs the project with an extra into it, unless that is done already. A script that is asked for help
# installs nothing: what was installed tells its flags, and where nothing was, its first lines say what it does.
setup_env() {
  if is_current "$1"; then return; fi
  if [ "$asks_help" = yes ]; then
    if [ -f "$VENV/.stamp-$1" ]; then return; fi
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    say "Its flags are shown once spmd[$1] is installed: the first run without --help does that."
    exit 0
  fi
  (
    # One script at a time. The lock is the repository's folder itself, so it leaves no file behind.
    if command -v flock >/dev/null; then flock 9 || true; fi
    install_extra "$1"
  ) 9<"$REPO_ROOT" || exit 1
}

# Installs Chromium for the tests that open the report in a browser, where that takes one command and no password.
# Without it these tests are skipped, and say so.
setup_browser() {
  local name
  for name in chromium chromium-browser google-chrome chrome; do
    if command -v "$name" >/dev/null; then return; fi
  done
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return; fi
  say "Installing Chromium for the tests of the report."
  { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 </dev/null ||
    say "Chromium could not be installed: the tests that need it are skipped."
}

# Becomes a module, with an extra installed: given EXTRA MODULE [flags].
exec_module() {
  local extra="$1"
  shift
  setup_env "$extra"
  export PATH="$VENV/bin:$PATH" PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
  exec "$VENV_PYTHON" -m "$@"
}

# Runs the module NAME of a folder with an extra installed: given FOLDER EXTRA NAME [flags]. Without a name it lists those
# that there are, each with the first line of its docstring.
run_module_of() {
  local folder="$1" extra="$2" name="${3:-}" file
  if [ -z "$name" ] || [ "$name" = --help ] || [ "$name" = -h ]; then
    say "usage: $folder/run NAME [flags]; $folder/run NAME --help lists the flags"
    for file in "$REPO_ROOT/$folder"/*.py; do
      if grep -q '^def main(arguments' "$file"; then
        printf '  %-20s %s\n' "$(basename "$file" .py)" "$(head -n 1 "$file" | tr -d '"')"
      fi
    done
    return
  fi
  [ -f "$REPO_ROOT/$folder/$name.py" ] || die "there is no $folder/$name.py; $folder/run lists what there is"
  shift 3
  exec_module "$extra" benchmarks "$folder.$name" "$@"
}
