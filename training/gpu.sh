#!/bin/bash
# On a machine with one or two GPUs: train everything, check it in SGLang, and leave the results in $OUT.
#   bash training/gpu.sh            needs .carry/corpus.npz.xz, .carry/heldout.json, .sglang/site.tar.xz
# Files left: pair.tar (both checkpoints), training.json, train.log, sglang_random.json, sglang_trained.json,
# sglang.log, cache.tar.xz (SGLang's compiled kernels; carry it next time as .sglang/cache.tar.xz).
set -u
export PYTHONUNBUFFERED=1
work=$(mktemp -d) start=$(date +%s)
lap() { echo "== $1 at $(($(date +%s) - start)) s"; }
mkdir "$work/site"
[ -f .sglang/cache.tar.xz ] && tar -C "$HOME" -xJf .sglang/cache.tar.xz
gpus=$(nvidia-smi -L | wc -l)
{
    tar -C "$work/site" -xJf .sglang/site.tar.xz
    python3 -m training.checkpoint "$work/random"
    CUDA_VISIBLE_DEVICES=$((gpus - 1)) PYTHONPATH=$work/site timeout 200 \
        python3 -m training.sglang_load "$work/random" --prompts 16 --out "$OUT/sglang_random.json"
    lap "SGLang with random weights"
} >"$OUT/sglang.log" 2>&1 &
random=$!
PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} timeout "${TRAIN_LIMIT:-400}" python3 -m training.sweep --out "$work/run" "$@" 2>&1 | tee "$OUT/train.log"
lap training
if [ -d "$work/run/drafter" ]; then
    tar -C "$work/run" -cf "$OUT/pair.tar" target drafter && cp "$work/run/training.json" "$OUT/"
else # the drafters failed: keep each target, so that --phase drafter --restart can go on from it
    for folder in "$work"/run/target_*; do tar -C "$folder" -cf "$OUT/$(basename "$folder").tar" .; done
fi
wait "$random"
grep -E "^SGLANG|did not come up|==" "$OUT/sglang.log"
PYTHONPATH=$work/site timeout 130 python3 -m training.sglang_load "$work/run" --limit 80 --out "$OUT/sglang_trained.json" 2>&1 |
    tee -a "$OUT/sglang.log" | tail -40
lap "SGLang with trained weights"
tar -C "$HOME" -cJf "$OUT/cache.tar.xz" .triton/cache .cache/tvm-ffi .cache/sglang 2>/dev/null
ls -l "$OUT"
lap end
