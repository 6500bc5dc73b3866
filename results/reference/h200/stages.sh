#!/usr/bin/env bash
# Stages 2 to 4 of the measurement plan on two GPUs: qwen3-4b on the first, qwen3-0.6b on the second, each arm n = 5 in
# randomised blocks, the most telling experiments first. (Stage 1 is experiment=static_vs_continuous and peers.)
#
# usage: stages.sh RESULTS        DRY=1: list the runs only       TRY=1: tiny-llama and n = 2, on any machine
#        RESULTS of an earlier call: finished runs are kept, the rest is measured (RESUME=1)
# REPEATS=5 blocks; DEADLINE=1500 s from the start, after which nothing is begun; MODELS="qwen3-4b qwen3-0.6b"
set -u
results=$(mkdir -p "${1:?name a folder for results}" && cd "$1" && pwd) || exit
py=${PY:-python3} repeats=${REPEATS:-5} deadline=${DEADLINE:-1500}
read -r -a models <<<"${MODELS:-qwen3-4b qwen3-0.6b}"
export HF_HUB_OFFLINE=1

# Staged: 160 requests in 4 s and a tail; burst: 96 at once. A run is 3 to 7 s of load and about as much start.
staged=(workload=staged workload.requests=160 arrival.rate=40)
burst=(workload=nano workload.requests=96 workload.low=64 workload.high=512)
common=(model.load_format=dummy measure.warmup_requests=32 measure.timeout_s=60 measure.reference_engine=null)
cache=(engine.num_blocks=2048)
[ -n "${TRY:-}" ] && {
    repeats=2
    staged=(workload=mixed_staged workload.requests=6 arrival.rate=50 workload.output_tokens.high=12)
    burst=(workload=mixed_burst workload.requests=6 workload.output_tokens.high=12)
    common=(measure.warmup_requests=1 measure.timeout_s=60 measure.reference_engine=null)
    models=(tiny-llama tiny-qwen3)
}

run() { # MODEL EXPERIMENT SETTINGS... : one experiment, if there is time
    local model=$1 name=$2 began=$SECONDS left=$((deadline - SECONDS)); shift 2
    local folder=$results/$model/$name extra=()
    [ -n "${DRY:-}" ] && extra+=(dry_run=true)
    [ -n "${RESUME:-}" ] && extra+=(resume=true)
    if [ $left -lt 30 ]; then echo "$model $name: no time left" | tee -a "$results/log.txt"; return; fi
    mkdir -p "$results/$model"
    timeout --signal=TERM --kill-after=15 "$left" "$py" -m harness -m "experiment=$name" "model=$model" "${common[@]}" \
        "measure.repeats=$repeats" "$@" "hydra.sweep.dir=$folder" "${extra[@]}" >"$folder.txt" 2>&1
    echo "$model $name: exit $? after $((SECONDS - began)) s" | tee -a "$results/log.txt"
    [ -n "${DRY:-}" ] && tail -3 "$folder.txt"
}

lane() { # MODEL : 25 arms
    run "$1" graphs_vs_async "${staged[@]}" "${cache[@]}"
    run "$1" max_batch_tokens "${staged[@]}" "${cache[@]}" engine.max_batch_tokens=512,2048,8192
    run "$1" num_blocks "${staged[@]}" engine.num_blocks=64,128,512
    run "$1" scheduler "${staged[@]}" "${cache[@]}" slo=chat
    run "$1" prefix_sharing "${cache[@]}" workload.requests=160 workload.prompt_tokens.low=640 \
        workload.prompt_tokens.high=1024 workload.prefix.tokens=512 workload.prefix.fraction=0.5
    run "$1" safety_margin "${staged[@]}" engine.num_blocks=96 slo=token_gap engine.safety_margin=0.0,0.15
    run "$1" cpu_offload "${staged[@]}" engine.num_blocks=64 engine.cpu_offload_space=0,16
    run "$1" attention_backend "${burst[@]}" "${cache[@]}" engine.attention_backend=triton,flash_attention_2
    run "$1" page_size "${staged[@]}" engine.attention_backend=triton engine.max_memory_percent=0.5 \
        engine.page_size=16,256
    run "$1" decode_fast_path "${burst[@]}" "${cache[@]}"
    run "$1" max_requests_per_batch "${burst[@]}" "${cache[@]}" engine.max_requests_per_batch=24,96
}

# One model a GPU, side by side; GPUS="3 5" names others.
read -r -a gpus <<<"${GPUS:-0 1}"
for i in "${!models[@]}"; do
    CUDA_VISIBLE_DEVICES=${gpus[$i]:-$i} lane "${models[$i]}" &
done
wait
# Of each run the parquet tables stay; csv copies are in the joined tables of the sweep.
[ -n "${DRY:-}" ] || find "$results" -mindepth 4 -name '*.csv' -delete
du -sh "$results" | tee -a "$results/log.txt"
