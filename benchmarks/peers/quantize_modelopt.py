"""NVIDIA's ModelOpt, with its defaults where the job says nothing.

Methods: rtn, awq_lite, awq_clip, awq_full; smoothquant for w8a8-static. It has no zero points: an asymmetric
job is refused.
"""

import copy
from typing import Any

import modelopt.torch.quantization as mtq
from quantize_job import Job, judge, load_model, measured, read_job, transformers_logits, unknown_method
from transformers import PreTrainedModel

PRESETS = {
    ("w8a8-static", "rtn"): mtq.INT8_DEFAULT_CFG,
    ("w8a8-static", "smoothquant"): mtq.INT8_SMOOTHQUANT_CFG,
    ("fp8", "rtn"): mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    ("fp8-static", "rtn"): mtq.FP8_DEFAULT_CFG,
}


def config(job: Job) -> dict[str, Any]:
    if job.scheme.startswith("int"):
        bits, group_size, symmetric = job.integers
        if not symmetric or bits != 4 or job.method not in ("rtn", "awq_lite", "awq_clip", "awq_full"):
            raise unknown_method(job)
        chosen = copy.deepcopy(mtq.INT4_AWQ_CFG)
        chosen["algorithm"] = "max" if job.method == "rtn" else {**chosen["algorithm"], "method": job.method}
        for entry in chosen["quant_cfg"]:
            if entry["quantizer_name"] == "*weight_quantizer" and entry.get("cfg"):
                entry["cfg"]["block_sizes"][-1] = group_size
    elif (job.scheme, job.method) in PRESETS:
        chosen = copy.deepcopy(PRESETS[job.scheme, job.method])
    else:
        raise unknown_method(job)
    if job.scope == "mlp":
        chosen["quant_cfg"].append({"quantizer_name": "*self_attn*", "enable": False})
    return chosen


def main() -> None:
    job = read_job()
    with measured() as costs:
        model = load_model(job)
        windows = job.calibration

        def run(model: PreTrainedModel) -> None:
            for window in windows:
                model.model(input_ids=window[None], use_cache=False)

        mtq.quantize(model, config(job), run)
    judge(job, "nvidia-modelopt", costs, transformers_logits(model))


if __name__ == "__main__":
    main()
