#!/bin/sh
# compute-sanitizer over small, hostile cases: memcheck, synccheck, initcheck and racecheck, all at once.
# Usage, from the repository root with src on PYTHONPATH:
#   scripts/gpu/sanitize.sh tree-ops [folder for logs]                 every tree operator
#   scripts/gpu/sanitize.sh [attention implementations] [folder]       racecheck does not know all their instructions
set -u
subject=${1:-naive,portable}
logs=${2:-/tmp}
python=${PYTHON:-python3}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every tensor its own allocation, so that memcheck sees its bounds
if [ "$subject" = tree-ops ]; then
  check='scripts/gpu/check_tree_ops.py --small' kernels=smxx_ races=fail
else
  check="scripts/gpu/check_attention.py --small --implementations $subject" kernels=tree_attention races=allow
fi
# shellcheck disable=SC2086
"$python" $check >"$logs/sanitize-plain.log" 2>&1 ||
  { tail -20 "$logs/sanitize-plain.log"; exit 1; } # also fills the cache, so that nothing compiles under the tool
for tool in memcheck synccheck initcheck racecheck; do
  # Only our kernels are checked; initcheck must follow everyone's writes, so it looks at all and we pick out ours.
  only="--kernel-regex kns=$kernels"
  [ "$tool" = initcheck ] && only=''
  (
    # shellcheck disable=SC2086
    timeout "${SANITIZE_SECONDS:-120}" compute-sanitizer --tool "$tool" $only --print-limit 200 "$python" $check \
      >"$logs/sanitize-$tool.log" 2>&1
    echo $? >"$logs/sanitize-$tool.exit"
  ) &
done
wait
failed=0
for tool in memcheck synccheck initcheck racecheck; do
  code=$(cat "$logs/sanitize-$tool.exit")
  ours=$(grep -cE "^=========.* at .*$kernels" "$logs/sanitize-$tool.log")
  summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/sanitize-$tool.log" | tail -1)
  printf '%-10s exit %s, in our kernels: %s; %s\n' "$tool" "$code" "$ours" "${summary:-no summary}"
  if [ "$code" -ne 0 ] || [ "$ours" -ne 0 ] || [ -z "$summary" ]; then
    grep -E '^=========|^FAILED|Error' "$logs/sanitize-$tool.log" | head -12
    [ "$tool" = racecheck ] && [ "$races" = allow ] || failed=1
  fi
done
exit "$failed"
