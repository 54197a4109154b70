#!/usr/bin/env bash
# All checks and measurements that need a GPU, in one call of under 10 minutes:
#
#   benchmarks/gpu.sh [RESULTS [DEVICE]]   RESULTS: default benchmarks/results; DEVICE: cuda or cpu
#
# With an H200 the stages but the last took 430 s, added up; a slower host takes longer. The last,
# memcheck of all tests of the ops, has what is left, or ONLY='build|sanitizer, all' has it alone.
#
# Builds the extension for this GPU in the checkout (no network, no build isolation), runs the tests
# marked cuda, the benchmarks (kernels; steps with NCCL at N = 1, and with the fake process group at
# N = 8 and 64; bytes that a step moves), and compute-sanitizer on the ops. Writes
# RESULTS/<gpu>-<date>-*.json and one log. A stage that fails is reported, the later ones still run
# unless it was the build, and the exit status is 1. With cpu, the same stages run without a GPU as
# far as they can: to try the script, not to measure.
#
# PYTHON: the interpreter that has torch and pytest (python3). ONLY: an extended regular expression;
# stages whose names it does not match are left out. TIME_LIMIT: seconds for the call (570).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

results=${1:-benchmarks/results}
device=${2:-cuda}
python=${PYTHON:-python3}
time_limit=${TIME_LIMIT:-570} # what does not fit any more is reported as not run

case $device in
cuda) nccl=nccl ;;
cpu) nccl=gloo ;;
*)
    echo "gpu.sh: DEVICE is '$device': use cuda or cpu" >&2
    exit 2
    ;;
esac

# The slug of the file names, and the GPU's architecture (90 for an H200).
name=$("$python" - "$device" <<'EOF'
import re, sys, time, torch
gpu = torch.cuda.get_device_name() if sys.argv[1] == "cuda" else "cpu"
print(re.sub("[^a-z0-9]+", "-", gpu.lower()) + time.strftime("-%Y-%m-%d"))
EOF
) || {
    echo "gpu.sh: $python finds no torch, or torch no GPU: set PYTHON, or try 'cpu'" >&2
    exit 2
}
mkdir -p "$results" || exit 2
results=$(cd "$results" && pwd)
log=$results/$name.log
printf '\n##### %s, stages %s\n' "$(date -u +%FT%TZ)" "${ONLY:-all}" >>"$log" # calls of a day share it

summary=()
failed=0

# stage NAME SECONDS COMMAND...: run it within its limit and the time left; remember how it ended.
# With may_be_cut=1 before it, to run out of time is no failure.
stage() {
    local title=$1 limit=$2 status start=$SECONDS
    shift 2
    [[ $title =~ ${ONLY:-.} ]] || return 0
    local left=$((time_limit - SECONDS))
    if ((left < 10)); then
        status="not run: no time left"
    else
        ((limit < left)) || limit=$left
        printf '\n=== %s: %s\n' "$title" "$*" | tee -a "$log"
        # Benchmarks end by SIGTERM with what they have measured, for which they need a moment.
        if timeout -k 25 "$limit" "$@" >"$log.stage" 2>&1; then
            status=ok
        else
            status="FAILED with status $? (124: over its $limit s)"
            if [[ $status == *"status 124 "* && -n ${may_be_cut:-} ]] &&
                ! grep -qE '^========= (Invalid|Misaligned|Error: Race|Program hit|Race)|FAILED' "$log.stage"; then
                status="cut after $limit s, nothing found until then"
            fi
        fi
        cat "$log.stage" >>"$log"
        # Progress bars redraw their line; only what they end with is worth printing.
        tr '\r' '\n' <"$log.stage" | tail -n 40
        rm -f "$log.stage"
    fi
    [[ $status == FAILED* || $status == "not run"* ]] && failed=1
    summary+=("$(printf '%-24s %4d s  %s' "$title" $((SECONDS - start)) "$status")")
}

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if [[ $device == cuda ]]; then
    # Without CUDA calls: what has made one cannot fork, and the tests' ranks are forked.
    export ZSHARD_CUDA=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
    # One architecture: building for all takes minutes, and is what the wheel's checks are for.
    capability='import torch; print("%d%d" % torch.cuda.get_device_capability())'
    ZSHARD_CUDA_ARCHS=$("$python" -c "$capability")
    export ZSHARD_CUDA_ARCHS
fi

# The extension alone: it needs nothing of pyproject.toml, whose license setuptools takes from 77 on.
build='
import runpy, sys
from setuptools import Distribution
Distribution.parse_config_files = lambda self, filenames=None, ignore_option_errors=False: None
sys.argv = ["setup.py", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")'
stage build 200 "$python" -c "$build"
if ((failed)); then
    printf '%s\n' "" "${summary[@]}" "nothing else can run" | tee -a "$log"
    exit 1
fi

if [[ $device == cuda ]]; then
    workers=()
    if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n 8 --dist worksteal); fi
    # The files that have such tests: others import packages that this machine may not have.
    mapfile -t cuda_tests < <(grep -lE 'mark\.cuda|import .*\bdevices\b' tests/test_*.py)
    pytest=("$python" -m pytest -m cuda -q -p no:cacheprovider --continue-on-collection-errors)
    stage "cuda tests" 120 "${pytest[@]}" "${cuda_tests[@]}" "${workers[@]}" -k "not ranks_of_one_gpu"
    quick=()
    models=(100m 350m)
    tokens=1024
else
    stage "cpu tests" 150 "$python" -m pytest tests/test_ops_cast.py -q -p no:cacheprovider
    quick=(--quick)
    models=(25m)
    tokens=128
fi

stage "ops" 160 "$python" benchmarks/bench_ops.py --device "$device" "${quick[@]}" \
    --json "$results/$name-ops.json"
stage "step, $nccl, N = 1" 100 "$python" benchmarks/bench_step.py --device "$device" "${quick[@]}" \
    --backend "$nccl" --ranks 1 --model "${models[@]}" --tokens $tokens --precision fp32 bf16/bf16 \
    --against fsdp2,ddp --json "$results/$name-step-n1.json"
for ranks in 8 64; do
    stage "step, fake, N = $ranks" 90 "$python" benchmarks/bench_step.py --device "$device" \
        "${quick[@]}" --backend fake --ranks $ranks --model "${models[@]}" --tokens $tokens \
        --precision bf16/bf16 --json "$results/$name-step-fake$ranks.json"
done
stage "bytes, fake, N = 8" 75 "$python" benchmarks/bench_bytes.py --device "$device" \
    --model "${models[0]}" --tokens $tokens --zshard zero3,split --json "$results/$name-bytes.json"
# Two ranks share the GPU over gloo: right losses across ranks, no figure of speed.
stage "losses, gloo, N = 2" 60 "$python" benchmarks/bench_step.py --device "$device" \
    --backend gloo --ranks 2 --model 25m --tokens 128 --precision fp32 bf16 --against ddp \
    --check-only --skip-host
if [[ $device == cuda ]]; then
    # Ranks that share the GPU spin at their barriers: nothing else may want it meanwhile. Behind
    # the benchmarks, as it is not known how long that takes.
    stage "cuda tests, ranks of one GPU" 120 "${pytest[@]}" --maxfail=1 \
        tests/test_symmetric.py -k ranks_of_one_gpu
    # The kernels whose threads share memory: sums of squares, gradients on their way into AdamW,
    # and the optimizers' prologue.
    # Of our kernels alone: torch's are not ours to judge, nor are its questions to the driver.
    checked=(--error-exitcode 86 --kernel-regex kns=zshard --report-api-errors no
        --launch-timeout 0)
    stage "racecheck" 150 compute-sanitizer --tool racecheck "${checked[@]}" \
        "$python" -m pytest tests/test_ops_{reduce,reduce_adamw,optim}.py -m cuda -q \
        -p no:cacheprovider -k "into_a_large_buffer or thousand_small_shards or more_segments"
    # Without torch's caching allocator each tensor is its own allocation, so that reading past a
    # tensor's end is seen. Under the tool a launch takes a hundred times as long: first every op
    # once, then as many of their tests as there is time for.
    sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck
        "${checked[@]}" "$python" -m pytest -m cuda -v -p no:cacheprovider --maxfail=5)
    stage "sanitizer, each op" 150 "${sanitizer[@]}" tests/test_ops_contract.py -k opcheck
    may_be_cut=1 stage "sanitizer, all" 400 "${sanitizer[@]}" \
        tests/test_ops_{pack,cast,peers,reduce,reduce_adamw,optim,sgd,clip}.py
fi

printf '%s\n' "" "=== $name, $SECONDS s" "${summary[@]}" | tee -a "$log"
exit $failed
