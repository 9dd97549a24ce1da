from pathlib import Path

import pytest

from tests.cli.conftest import Qtool

RECIPE = """\
version: 1
calibration: {num_samples: 2, seq_len: 16}
quantization:
  rules:
    - targets: ["*.mlp.*"]
      weights: {group_size: 32}
      method: gptq
"""


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--max-memory", "plenty", "'plenty' is no size of memory; write it as in 6GB or 1.5GiB"),
        ("--device", "gpu", "device 'gpu' is unknown; wanted cpu, cuda, cuda:0,cuda:1 or auto"),
    ],
)
def test_wrong_resources_are_refused_before_any_work(
    qtool: Qtool, tiny: Path, tmp_path: Path, option: str, value: str, problem: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    ended = qtool("quantize", tiny, "--recipe", recipe, "-o", tmp_path / "out", option, value)
    assert ended.code == 2
    assert problem in " ".join(ended.err.split())
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


def test_neither_memory_nor_devices_change_what_is_written(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    for name, options in (("one", []), ("two", ["--max-memory", "1KB", "--device", "cpu"])):
        ended = qtool("quantize", tiny, "--recipe", recipe, "-o", tmp_path / name, *options)
        assert ended.code == 0, ended.err
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
