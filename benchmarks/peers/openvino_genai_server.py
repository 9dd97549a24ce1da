"""OpenVINO GenAI's continuous batching behind as much of the OpenAI API as the benchmark asks for.

It comes without a server of its own. Run it in an environment with openvino-genai:

    python benchmarks/peers/openvino_genai_server.py MODEL --port 8001 --threads 2
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

import numpy as np
import openvino as ov
import openvino_genai as genai

_POOL_TOKENS = 32768


class Engine:
    """The pipeline, stepped by one thread while there are requests."""

    def __init__(self, model: str, threads: int) -> None:
        config = genai.SchedulerConfig()
        config.num_kv_blocks = _POOL_TOKENS // 32
        config.max_num_seqs = 64
        self._pipeline = genai.ContinuousBatchingPipeline(
            model, config, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._inbox: SimpleQueue[tuple[list[int], int, SimpleQueue[list[int]]]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, prompt: list[int], max_tokens: int) -> "SimpleQueue[list[int]]":
        """A queue of new tokens; an empty list ends it."""
        tokens: SimpleQueue[list[int]] = SimpleQueue()
        self._inbox.put((prompt, max_tokens, tokens))
        return tokens

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def _work(self) -> None:
        running: dict[int, tuple[genai.GenerationHandle, SimpleQueue[list[int]]]] = {}
        number = 0
        while True:
            while not running or not self._inbox.empty():
                prompt, max_tokens, tokens = self._inbox.get()
                config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True)
                ids = ov.Tensor(np.array([prompt], np.int64))
                running[number] = (self._pipeline.add_request(number, ids, config), tokens)
                number += 1
            self._pipeline.step()
            for key, (handle, tokens) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.put(list(output.generated_ids))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    tokens.put([])
                    del running[key]


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "model"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens, number = engine.submit(asked["prompt"], asked["max_tokens"]), 0
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            while new := tokens.get():
                number += len(new)
                self._event({"choices": [{"text": engine.text(new)}]})
            self._event({"choices": [], "usage": {"completion_tokens": number}})

        def _event(self, event: dict[str, object]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Keep the log to errors."""

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", args.port), handler(Engine(args.model, args.threads)))
    server.daemon_threads = True
    server.request_queue_size = 128
    server.serve_forever()


if __name__ == "__main__":
    main()
