#!/bin/sh
# compute-sanitizer over the small cases of check_attention.py: memcheck, synccheck, initcheck, and racecheck where it
# knows the instructions. Usage, from the repository root with src on PYTHONPATH:
#   scripts/gpu/sanitize.sh [implementations] [folder for logs]
set -u
implementations=${1:-naive,portable}
logs=${2:-/tmp}
python=${PYTHON:-python3}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor its own allocation, so that memcheck sees its bounds
failed=0
"$python" scripts/gpu/check_attention.py --small --implementations "$implementations" >"$logs/sanitize-plain.log" 2>&1 ||
  { tail -20 "$logs/sanitize-plain.log"; exit 1; } # also fills the cache, so that nothing compiles under the tool
for tool in memcheck synccheck initcheck racecheck; do
  # Only our kernels are checked; initcheck must follow everyone's writes, so it looks at all and we pick out ours.
  only='--kernel-regex kns=tree_attention'
  [ "$tool" = initcheck ] && only=''
  # shellcheck disable=SC2086
  timeout "${SANITIZE_SECONDS:-120}" compute-sanitizer --tool "$tool" $only --print-limit 200 \
    "$python" scripts/gpu/check_attention.py --small --implementations "$implementations" \
    >"$logs/sanitize-$tool.log" 2>&1
  code=$?
  ours=$(grep -cE '^=========.* at .*tree_attention' "$logs/sanitize-$tool.log")
  summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/sanitize-$tool.log" | tail -1)
  printf '%-10s exit %s, in our kernels: %s; %s\n' "$tool" "$code" "$ours" "${summary:-no summary}"
  if [ "$code" -ne 0 ] || [ "$ours" -ne 0 ] || [ -z "$summary" ]; then
    grep -E '^=========|^FAILED|Error' "$logs/sanitize-$tool.log" | head -12
    [ "$tool" = racecheck ] || failed=1
  fi
done
exit "$failed"
