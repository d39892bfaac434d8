#!/usr/bin/env bash
# Serves the tiny model of setup.sh on 127.0.0.1:PORT with a real vLLM engine, on the CPU.
#
#   serve.sh PORT [further `vllm serve` flags]
#
# GET /health answers 200 after 20 to 40 s. The engine is small on purpose, so that pressure is easy to make: 32 running
# sequences and 255 usable KV blocks of 32 tokens. The weights are random: a reply has a fixed length only with
# "ignore_eos": true and "max_tokens".
set -euo pipefail

venv=${FAIRGATE_VLLM_VENV:-$HOME/.cache/fairgate/vllm}
port=${1:?usage: serve.sh PORT [vllm serve flags]}
shift
[ -e "$venv/tiny/config.json" ] || { echo "serve.sh: no vLLM in $venv: run setup.sh first" >&2; exit 1; }

# Nothing is fetched or reported while serving.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1
# One compute thread, free to move: the gateway and the clients need cores too.
export VLLM_TARGET_DEVICE=cpu VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}

flags=(
    --host 127.0.0.1 --port "$port" --served-model-name tiny
    --load-format dummy --dtype bfloat16 --enforce-eager
    --max-model-len 4096 --max-num-seqs 32
    --block-size 32 --num-gpu-blocks-override 256
    --enable-prompt-tokens-details
)
exec "$venv/bin/vllm" serve "$venv/tiny" "${flags[@]}" "$@"
