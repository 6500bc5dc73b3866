#!/usr/bin/env bash
# The four stages of the measurement plan: Qwen3-4B and Qwen3-0.6B, each arm n = 5 in randomised blocks. Every GPU takes
# one experiment after the other from a common queue, the most telling ones first.
#
# usage: stages.sh RESULTS     the same folder again goes on where it was cut off: what is measured stays
# DEADLINE=1500 s from the start, when all ends; REPEATS=5 blocks; GPUS="0 1"; MODELS="qwen3-4b qwen3-0.6b", one or two;
# ONLY="num_blocks scheduler"; DRY=1: list the runs; TRY=1: toy models, a sixteenth of the load, on any machine
set -u
results=$(mkdir -p "${1:?name a folder for results}" && cd "$1" && pwd) || exit
py=${PY:-python3} deadline=${DEADLINE:-1500} cut=1 small='' kernels=(triton flash_attention_2) padded=flash_attention_2
[ -n "${TRY:-}" ] && MODELS=${MODELS:-tiny-llama tiny-qwen3} cut=16 small=_small kernels=(sdpa eager) padded=sdpa
read -r -a models <<<"${MODELS:-qwen3-4b qwen3-0.6b}"
read -r -a gpus <<<"${GPUS:-0 1}"
export HF_HUB_OFFLINE=1
claims=$(mktemp -d) || exit
trap 'rm -rf "$claims"' EXIT

# The queue: for each model its experiments, in turn; what is cut off at the end tells least.
waves=(static_vs_continuous-{mixed_staged,mixed_burst,uniform_burst})
first=(graphs_vs_async num_blocks max_batch_tokens prefix_sharing scheduler safety_margin attention_backend
    decode_fast_path page_size max_requests_per_batch cpu_offload "${waves[@]}")
second=("${waves[@]:0:2}" "${first[@]:0:4}" "${waves[2]}" "${first[@]:4:7}")

settings() { # MODEL EXPERIMENT : into the array `set`. A run is 2 to 8 s of load; README.md says what is expected of it
    local k=2; [[ $1 == *0.6b ]] && k=5 # requests and rates: what the small model serves in the same time
    local cache=engine.num_blocks=2048 chunks=engine.max_batch_tokens=2048
    # Launched kernel by kernel a decode step waits 12 to 20 ms for the host: captured where the device can.
    local graphs=engine.use_cuda_graph=null
    local staged=($graphs workload=staged arrival.rate=$((20 * k))
        workload.{requests=$((80 * k / cut)),low=$((64 / cut)),high=$((1024 / cut))})
    local long=($chunks workload=mixed_burst $graphs $cache workload.requests=$((32 * k / cut))
        workload.prompt_tokens.{low=$((2048 / cut)),high=$((4096 / cut))}
        workload.output_tokens.{low=$((64 / cut)),high=$((128 / cut))})
    # Flash attention 2 for all three arms: padded generate can use it too, so it is no part of the difference.
    local waves=(workload="${2#*-}" workload.requests=$((128 / cut)) measure.warmup_requests=$((64 / cut))
        model.attn_implementation=$padded
        engine=static,transformers${small}_pinned,ours${small}_pinned)
    local unequal=(workload.prompt_tokens.{low=$((32 / cut)),high=$((512 / cut))}
        workload.output_tokens.{low=$((16 / cut)),high=$((192 / cut))})
    case $2 in
        graphs_vs_async) set=("${staged[@]:1}" $cache workload.high=$((512 / cut))) ;;
        num_blocks) set=("${staged[@]}" engine.num_blocks=64,128,512) ;;
        max_batch_tokens) set=("${long[@]:2}" workload=mixed_staged arrival.rate=$((8 * k))
            workload.{prompt_tokens.low=$((512 / cut)),output_tokens.high=$((256 / cut))}
            engine.max_batch_tokens=512,2048,8192) ;;
        prefix_sharing) set=($graphs $chunks engine.num_blocks=8192 workload.requests=$((80 * k / cut))
            workload.prompt_tokens.{low=640,high=896} workload.prefix.{tokens=512,fraction=0.5}) ;;
        scheduler) set=("${staged[@]}" $cache slo=chat) ;;
        safety_margin) set=("${staged[@]}" engine.num_blocks=64 engine.safety_margin=0.0,0.15 slo=token_gap) ;;
        attention_backend) set=("${long[@]}" engine.attention_backend="${kernels[0]},${kernels[1]}") ;;
        decode_fast_path) set=("${long[@]}") ;;
        page_size) set=("${staged[@]}" engine.attention_backend="${kernels[0]}" engine.max_memory_percent=0.025
            engine.max_requests_per_batch=64 engine.max_blocks_per_request=128 engine.page_size=16,256) ;;
        max_requests_per_batch) set=($graphs $cache $chunks workload=nano engine.max_requests_per_batch=24,96
            workload.{requests=$((48 * k / cut)),low=$((64 / cut)),high=$((512 / cut))}) ;;
        cpu_offload) set=("${staged[@]}" engine.num_blocks=64 engine.cpu_offload_space=0,4) ;;
        *-mixed_staged) set=("${waves[@]/=static,/=static_waves_64,}" "${unequal[@]}" arrival.rate=40) ;;
        *-mixed_burst) set=("${waves[@]}" "${unequal[@]}") ;;
        *-uniform_burst) set=("${waves[@]}" workload.prompt_tokens.value=$((256 / cut))
            workload.output_tokens.value=$((192 / cut))) ;;
    esac
}

run() { # MODEL EXPERIMENT : unless another GPU has it, it is done, or there is no time
    local folder=$results/$1/$2 began=$SECONDS left=$((deadline - SECONDS)) extra=() code set
    [[ -z ${ONLY:-} || " $ONLY " == *" $2 "* ]] && mkdir "$claims/$1-$2" 2>/dev/null || return
    grep -qs "^$1 $2: exit 0 " "$results/log.txt" && return
    [ $left -ge 30 ] || { echo "$1 $2: no time left"; return; }
    settings "$1" "$2"
    [ -s "$folder/manifest.jsonl" ] && extra=(resume=true)
    mkdir -p "$results/$1"
    timeout --signal=TERM --kill-after=30 "$left" "$py" -m harness -m "experiment=${2%%-*}" "model=$1" \
        measure.warmup_requests=32 measure.{timeout_s=60,start_timeout_s=180,reference_engine=null} \
        report=false measure.repeats="${REPEATS:-5}" "${set[@]}" "hydra.sweep.dir=$folder" "${extra[@]}" \
        ${DRY:+dry_run=true} >>"$folder.txt" 2>&1
    code=$?
    if [ -n "${DRY:-}" ]; then tail -2 "$folder.txt"; return; fi
    echo "$1 $2: exit $code after $((SECONDS - began)) s" | tee -a "$results/log.txt"
}

lane() {
    local i
    for i in "${!first[@]}"; do
        run "${models[0]}" "${first[i]}"
        [ ${#models[@]} -lt 2 ] || run "${models[1]}" "${second[i]}"
    done
}

for gpu in "${gpus[@]}"; do
    CUDA_VISIBLE_DEVICES=$gpu lane &
done
wait
# Of each run the parquet tables stay; csv copies are in the joined tables of the sweep.
find "$results" -mindepth 4 \( -name '*.csv' -o -name report.html \) -delete
du -sh "$results"
