import json
from pathlib import Path

from tests.cli.conftest import Qtool


def test_inspect_prints_tables(tiny: Path, qtool: Qtool) -> None:
    ended = qtool("inspect", tiny, "--bandwidth", "100", "--flops", "2")
    assert ended.code == 0
    for text in (
        "LlamaForCausalLM, 3 layers",
        "layers.*.mlp.down_proj",
        "embeddings",
        "decode, 1 x 1024",
        "memory",
    ):
        assert text in ended.out


def test_inspect_prints_json(tiny: Path, qtool: Qtool) -> None:
    ended = qtool("inspect", tiny, "--json", "--bandwidth", "100", "--batch", "3", "--kv-cache", "u8")
    report = json.loads(ended.out)
    assert report["machine"] == {"bandwidth": 100e9, "flops": None, "measured": False}
    assert report["steps"]["decode, 3 x 1024"]["tokens"] == 3
    assert report["steps"]["prefill, 3 x 512"]["bound"] is None
    assert sum(report["parts"].values()) == report["weight_bytes"]


def test_inspect_refuses_what_makes_no_sense(tiny: Path, qtool: Qtool) -> None:
    ended = qtool("inspect", tiny, "--flops", "2")
    assert (ended.code, ended.out) == (2, "")
    assert "give --bandwidth too" in ended.err
    ended = qtool("inspect", tiny, "--kv-cache", "u9", "--bandwidth", "1")
    assert ended.code == 2
    assert "--kv-cache 'u9' is unknown; known: f16, f32, u8" in ended.err
