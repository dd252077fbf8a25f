#!/bin/bash
# Live parts in lanes on the GPUs that are visible: scripts/gpu/live_lanes.sh PLAN SECONDS, with OUT=FOLDER
#   PLAN     lines of LANE NAME GPUS SECONDS AFTER COMMAND...; # begins a comment. A lane runs its parts in order, lanes run
#            side by side. AFTER: a part of another lane that must have ended, or -; with + before it the part starts its
#            servers at once and waits then (LIVE_HOLD names a file that is there when the other has ended).
#   SECONDS  for all: a part gets its own limit or what is left, and none begins in the last 20 s
# A part's COMMAND runs with OUT (its own folder), CUDA_VISIBLE_DEVICES, LIVE_PORTS (its own range) and LIVE_PIDS. At its
# limit it gets SIGTERM, and SIGKILL 15 s later; its servers are ended after it in any case. What parts leave, with logs
# cut to their ends, is packed into OUT/lanes.tar.gz, below LIMIT_MB (16), also when this script is stopped.
set -u
plan=${1:?a plan}; total=${2:?seconds}; out=${OUT:?a folder for the archive}; limit=$((${LIMIT_MB:-16} * 1000000))
work=$(mktemp -d); begin=$SECONDS
left() { echo $((total - (SECONDS - begin))); }

part() { # INDEX NAME GPUS SECONDS AFTER COMMAND
  local folder=$work/$2 seconds=$4 after=$5 hold= code group started
  mkdir -p "$folder"
  case $after in +*) hold=$work/.ended-${after#+}; after=- ;; esac
  while [ "$after" != - ] && [ ! -e "$work/.ended-$after" ] && [ "$(left)" -gt 20 ]; do sleep 1; done
  [ "$seconds" -gt $(($(left) - 20)) ] && seconds=$(($(left) - 20))
  if [ "$seconds" -le 0 ]; then
    echo "$2: not run, no time left"
  else
    started=$SECONDS
    OUT=$folder CUDA_VISIBLE_DEVICES=$3 LIVE_PORTS=$((10000 + 2700 * ($1 - 1))) LIVE_PIDS=$folder/pids LIVE_HOLD=$hold \
      timeout -k 15 "$seconds" bash -c "$6" >"$folder/out.txt" 2>&1
    code=$?
    while read -r group; do kill -9 -- "-$group" 2>/dev/null; done < <(cat "$folder/pids" 2>/dev/null)
    echo "$2: rc $code, $((SECONDS - started)) of $seconds s; $(grep '^{"part"' "$folder/out.txt" | tail -1 | cut -c1-300)"
  fi
  touch "$work/.ended-$2"
}

pack() {
  local name
  for name in "$work"/*/out.txt "$work"/*/*.log; do
    [ -f "$name" ] && tail -c 60000 "$name" >"$name.end" && mv "$name.end" "$name"
  done
  rm -f "$work"/*/pids
  tar -C "$work" --exclude='.ended-*' -czf "$out/lanes.tar.gz" .
  if [ "$(stat -c %s "$out/lanes.tar.gz")" -gt "$limit" ]; then # records first
    tar -C "$work" --exclude='.ended-*' --exclude='logs_*' --exclude='*.html' -czf "$out/lanes.tar.gz" .
    echo "logs are left out: the archive was beyond $limit bytes"
  fi
  if [ "$(stat -c %s "$out/lanes.tar.gz")" -gt "$limit" ]; then
    (cd "$work" && find . -name '*.json' -size -1000k -print0 | tar --null -czf "$out/lanes.tar.gz" -T -)
    echo "only records below 1 MB are kept: the archive was beyond $limit bytes"
  fi
  echo "archive: $(stat -c %s "$out/lanes.tar.gz") bytes, all: $((SECONDS - begin)) s"
}

stopped() {
  local child
  for child in $(jobs -p); do kill -TERM -- "-$child" 2>/dev/null; done
  sleep 5
  cat "$work"/*/pids 2>/dev/null | while read -r group; do kill -9 -- "-$group" 2>/dev/null; done
  pack
  exit 1
}

lines=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$plan" | cat -n)
[ "$(wc -l <<<"$lines")" -gt 8 ] && { echo "$plan: more than 8 parts: their ports would meet"; exit 2; }
lanes=$(awk '{print $2}' <<<"$lines" | sort -u)
set -m # each lane a process group, so that all of it can be stopped
for lane in $lanes; do
  while read -r index of name gpus seconds after command; do
    [ "$of" = "$lane" ] && part "$index" "$name" "$gpus" "$seconds" "$after" "$command" </dev/null
  done <<<"$lines" &
done
trap stopped TERM INT
wait
pack
