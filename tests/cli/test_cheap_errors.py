"""What can be refused without torch is refused before it is imported, which takes seconds."""

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
from qtool.cli import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "command",
    [
        "quantize none --recipe awq4 -o out",
        "quantize none --recipe awq5 -o out",
        "quantize none --recipe awq4 --num-samples 0 -o out",
        "convert none out --format awq",
        "convert none out --format gtpq",
        "diff none neither",
        "sensitivity none",
        "sensitivity none --plot picture.bmp",
        "eval none --baseline neither",
        "compile none --target openvino -o out",
        "compile none --target opnvino -o out",
        "compile none --target openvino --kv-cache f64 -o out",
        "compile none --target tensorrt-rtx --cc 8x -o out",
        "inspect none",
        "inspect none --kv-cache u9",
        "inspect none --flops 2",
        "serve none --speculative ngrams",
        "serve none --slo soon",
        "run none hello",
        "run none hello --raw --system be-brief",
        "batch none requests.jsonl out.jsonl",
        "skip-layers none --layers 1 -o out",
        "skip-layers none --layers x -o out",
    ],
)
def test_a_cheap_error_comes_before_torch(command: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *command.split()], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout.split()[-1:] == ["False"], ended.stderr
