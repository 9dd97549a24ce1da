#!/usr/bin/env bash
# The main job on the real model: fetch, quantize, judge, compile, serve, ask. `make demo` runs it.
# The calibration is an eighth of the recipe's, so that the whole takes a few minutes on two cores.
set -euo pipefail

qtool=${QTOOL:-qtool}
model=smollm2-135m-instruct
out=demo
port=${DEMO_PORT:-8437}

say() { printf '\n\033[1m$ %s\033[0m\n' "$*" >&2; "$@"; }

rm -rf "$out"
mkdir "$out"
say "$qtool" fetch "$model"
say "$qtool" quantize "$model" --recipe awq4 --num-samples 16 -o "$out/awq4"
say "$qtool" eval "$out/awq4" --baseline "$model" --recipe awq4 --num-windows 2 --max-kl 0.2
say "$qtool" compile "$out/awq4" --target openvino -o "$out/engine"

printf '\n\033[1m$ %s\033[0m\n' "$qtool serve $out/engine --served-model-name smollm2 --port $port &" >&2
"$qtool" serve "$out/engine" --served-model-name smollm2 --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true' EXIT

question='{"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 40, "temperature": 0}'
printf '\n\033[1m$ POST /v1/chat/completions %s\033[0m\n' "$question" >&2
QUESTION=$question URL=http://127.0.0.1:$port SERVER=$server "$(dirname "$qtool")/python" - <<'ASK'
import json, os, time, urllib.error, urllib.request

url = os.environ["URL"]
for _ in range(600):
    os.kill(int(os.environ["SERVER"]), 0)  # raises when the server has died
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5)
        break
    except urllib.error.URLError:
        time.sleep(0.2)
request = urllib.request.Request(
    f"{url}/v1/chat/completions",
    data=os.environ["QUESTION"].encode(),
    headers={"Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request, timeout=120))
print(answer["choices"][0]["message"]["content"])
ASK
