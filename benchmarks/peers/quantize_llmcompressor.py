"""llm-compressor, with its defaults where the job says nothing.

Methods: rtn, gptq, awq, awq+gptq; with rounded activations also smoothquant and smoothquant+gptq. With -mse
at the end (gptq-mse) ranges of weights are searched for the least square error; its default are the extremes.
"""

from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from quantize_job import Job, judge, load_model, measured, read_job, transformers_logits, unknown_method

TARGETS = {"mlp": [r"re:.*\.mlp\..*_proj$"], "linears": ["Linear"]}
TRANSFORMS = {"awq": AWQModifier, "smoothquant": SmoothQuantModifier}
ACTIVATIONS = {
    "w8a8": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    "w8a8-static": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"},
    "fp8": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    "fp8-static": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
}


def scheme(job: Job) -> dict[str, Any]:
    """A group of compressed-tensors' config."""
    targets = TARGETS[job.scope]
    if job.scheme in ACTIVATIONS:
        kind = "float" if job.scheme.startswith("fp8") else "int"
        weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
        return {"targets": targets, "weights": weights, "input_activations": ACTIVATIONS[job.scheme]}
    bits, group_size, symmetric = job.integers
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
    return {"targets": targets, "weights": {**weights, "group_size": group_size}}


def recipe(job: Job) -> list[Modifier]:
    parts = job.method.removesuffix("-mse").split("+")
    rounding = GPTQModifier if parts[-1] == "gptq" else QuantizationModifier
    transforms = [part for part in parts if part not in ("gptq", "rtn")]
    if not TRANSFORMS.keys() >= set(transforms):
        raise unknown_method(job)
    observer = {"weight_observer": "mse"} if job.method.endswith("-mse") else {}
    last = rounding(config_groups={"group_0": scheme(job)}, ignore=["lm_head"], **observer)
    return [*(TRANSFORMS[name]() for name in transforms), last]


def main() -> None:
    job = read_job()
    if not torch.accelerator.is_available():  # its AWQ pins memory for copies to a GPU, which fails without
        IntermediatesCache.pin_memory = lambda *_: None
    with measured() as costs:
        model = load_model(job)
        ids = job.calibration
        oneshot(
            model=model,
            dataset=Dataset.from_dict(
                {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
            ),
            recipe=recipe(job),
            num_calibration_samples=job.num_samples,
            max_seq_length=job.seq_len,
            shuffle_calibration_samples=False,
        )
    judge(job, "llmcompressor", costs, transformers_logits(model))


if __name__ == "__main__":
    main()
