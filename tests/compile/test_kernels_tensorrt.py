"""The TensorRT plugins through NVIDIA's Python layer, up to what TensorRT would launch. No GPU is needed."""

import json
import sys
from pathlib import Path
from subprocess import PIPE, run
from typing import Any

import pytest

from qtool.compile.kernels.paged_attention import attend, merge
from qtool.compile.kernels.spec import AttentionSpec, grid, max_partial_rows, num_splits, tiles
from qtool.compile.kernels.tensorrt_plugin import ATTRIBUTES, INPUTS, MERGED

SPEC = AttentionSpec(9, 3, 64, 16, 0.125, split=True)
MAX_BLOCKS = 512
OPTIONS = {
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "block_size": 16,
    "scale": 0.125,
    "window": 0,
    "has_tree": 0,
    "compute_capability": 90,
}

# T and B of a batch of one with a long context, of eight sequences that verify 5 drafts, and of a chunk.
EXTENTS = {"decode": (1, 1), "verify": (48, 8), "chunk": (512, 1)}


def case(tokens: int, sequences: int, tactic: int) -> dict[str, Any]:
    """One layer of SmolLM2 on sm_90."""
    new, pool = [tokens, 3, 64], [1000, 3, 16, 64]
    inputs: dict[str, tuple[list[int], str]] = {
        "queries": ([tokens, 9, 64], "HALF"),
        "new_keys": (new, "HALF"),
        "new_values": (new, "HALF"),
        "key_pool": (pool, "HALF"),
        "value_pool": (pool, "HALF"),
        "block_tables": ([sequences, MAX_BLOCKS], "INT32"),
        "past_lens": ([sequences], "INT32"),
        "new_starts": ([sequences + 1], "INT32"),
        "positions": ([tokens], "INT32"),
        "tree": ([1, 1], "BOOL"),
        "key_scales": ([1], "FLOAT"),
        "value_scales": ([1], "FLOAT"),
    }
    return {
        "name": "attend",
        "inputs": [inputs[name] for name in INPUTS],
        "attributes": OPTIONS,
        "tactic": tactic,
    }


def merge_case(kind: str) -> dict[str, Any]:
    """Six sequences that verify 7 drafts."""
    inputs = {
        "parts": ([426, 9, 64], "FLOAT"),
        "lse": ([426, 9], "FLOAT"),
        "queries": ([48, 9, 64], kind),
        "block_tables": ([6, MAX_BLOCKS], "INT32"),
    }
    return {
        "name": "merge",
        "inputs": [inputs[name] for name in MERGED],
        "attributes": OPTIONS,
        "tactic": 0,
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case has TensorRT launch. One process for all, since it takes seconds to start."""
    cases = {
        f"{name} {tactic}": case(*extent, tactic) for name, extent in EXTENTS.items() for tactic in (1, 2)
    }
    cases |= {f"merge {dtype}": merge_case(dtype) for dtype in ("HALF", "BF16")}
    script = Path(__file__).with_name("kernels_tensorrt.py")
    done = run(
        [sys.executable, script], input=json.dumps(list(cases.values())), stdout=PIPE, text=True, check=True
    )
    # TensorRT's own log shares stdout.
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("tactic", [1, 2])
@pytest.mark.parametrize("extent", EXTENTS)
def test_tensorrt_launches_what_the_torch_engine_would(
    told: dict[str, Any], extent: str, tactic: int
) -> None:
    tokens, sequences = EXTENTS[extent]
    tile = tiles(SPEC)[tactic - 1]
    splits = num_splits(SPEC, tokens, sequences, MAX_BLOCKS)
    launch = told[f"{extent} {tactic}"]
    assert launch["grid"] == list(grid(SPEC, tile, tokens, sequences, splits))
    assert launch["block"] == [tile.num_warps * 32, 1, 1]
    assert launch["scalars"] == [tokens, sequences, MAX_BLOCKS, 1]
    rows = max_partial_rows(SPEC, tokens)
    assert rows >= splits * tokens
    assert launch["outputs"] == [[[rows, 9, 64], "FLOAT"], [[rows, 9], "FLOAT"]]
    assert launch["tactics"] == [1, 2]
    assert launch["kernel"] == "attend"


def test_a_long_context_is_cut_and_a_chunk_is_not(told: dict[str, Any]) -> None:
    assert told["decode 1"]["grid"][2] > 1
    assert told["chunk 2"]["grid"][2] == 1


def test_kernels_take_inputs_then_scalars_then_outputs_as_tensorrt_passes_them(told: dict[str, Any]) -> None:
    assert told["decode 1"]["parameters"] == ["u64"] * len(INPUTS) + ["u32"] * 4 + ["u64"] * 2
    assert attend.arg_names[:18] == [
        *INPUTS,
        "num_tokens",
        "num_sequences",
        "max_blocks",
        "tree_width",
        "output",
        "lse",
    ]
    assert told["merge HALF"]["parameters"] == ["u64"] * len(MERGED) + ["u32"] * 2 + ["u64"]
    assert merge.arg_names[:7] == [*MERGED, "num_rows", "num_splits", "output"]


def test_a_parser_is_told_the_fields_to_read_off_a_node(told: dict[str, Any]) -> None:
    kinds = {int: "INT64", float: "FLOAT64"}
    for name in ("decode 1", "merge HALF"):
        assert told[name]["fields"] == {field: kinds[kind] for field, kind in ATTRIBUTES.items()}


@pytest.mark.parametrize("kind", ["HALF", "BF16"])
def test_merge_gives_one_row_a_head_in_the_dtype_of_the_queries(told: dict[str, Any], kind: str) -> None:
    launch = told[f"merge {kind}"]
    assert launch["outputs"] == [[[48, 9, 64], kind]]
    assert launch["grid"] == [48 * 9, 1, 1]
    assert launch["scalars"] == [48 * 9, num_splits(SPEC, 48, 6, MAX_BLOCKS)]
    assert launch["scalars"][1] > 1
