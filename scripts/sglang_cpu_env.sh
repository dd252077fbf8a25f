#!/bin/bash
# A virtual environment in which real SGLang runs on a machine without a GPU (its Triton kernels in the interpreter),
# with this checkout installed. Used by `make test-sglang`.
#   scripts/sglang_cpu_env.sh VENV
# VENV is small and made anew each time. SGLang and what it needs (2.5 GB, a few minutes to make) are kept for all
# checkouts in the folder TREEVERIFY_SGLANG_CACHE (default: ~/.cache/treeverify), under a name that the lists of packages
# and the Python version make up; they are used again while they are whole.
set -euo pipefail
venv=$1; scripts=$(cd "$(dirname "$0")" && pwd); python=${PYTHON:-python3}
unset PYTHONPATH PYTHONHOME
lists=("$scripts/sglang_cpu.txt" "$scripts/sglang_cpu_oldest.txt")
key=$({ cat "${lists[@]}"; "$python" -VV; } | sha256sum | cut -c1-12)
kept=${TREEVERIFY_SGLANG_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/treeverify}/sglang-0.5.23-$key

make_kept() {
  rm -rf "$kept"
  "$python" -m venv "$kept"
  local pip=("$kept/bin/python" -m pip install --disable-pip-version-check -q)
  "${pip[@]}" -c "${lists[0]}" torch==2.13.0 # a build that needs more brings it: one for CUDA works as well
  "${pip[@]}" --no-deps -r "${lists[0]}"
  "${pip[@]}" --no-deps --target "$kept/sglang-0.5.17" -r "${lists[1]}"
  touch "$kept/.complete"
}

make_venv() {
  "$python" -m venv --clear --without-pip "$venv"
  ln -s "$kept/sglang-0.5.17" "$venv/sglang-0.5.17"
  local packages name
  name=$("$venv/bin/python" -c "import os, sys, sysconfig; print(os.path.relpath(sysconfig.get_path('purelib'), sys.prefix))")
  packages=$venv/$name
  # Read last, so that this checkout comes before whatever is kept.
  echo "import site; site.addsitedir('$kept/$name')" >"$packages/zz_sglang.pth"
  # A torch built for the CPU lacks two operators that torchvision declares at import.
  cp "$scripts/torchvision_on_cpu.py" "$packages/"
  echo "import torchvision_on_cpu" >"$packages/torchvision_on_cpu.pth"
}

imports() { "$venv/bin/python" -W ignore -c "import pip, hatchling, pytest, torch, torchvision, triton, sglang.srt.server_args"; }

mkdir -p "$(dirname "$kept")" "$(dirname "$venv")"
exec 9>"$kept.lock"
flock 9 # another checkout may be making it
make_venv
if ! { test -e "$kept/.complete" && imports >/dev/null 2>&1; }; then
  echo "making $kept"
  make_kept
  imports
fi
flock -u 9
"$venv/bin/python" -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e "$scripts/.."
