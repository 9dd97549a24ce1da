"""GPTQModel, with its defaults where the job says nothing. Methods: gptq, gptaq."""

import os
import tempfile

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it starts with no fewer, and two cores would give one

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.models.base import BaseQModel
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from gptqmodel.quantization.config import GPTAQConfig
from quantize_job import Job, judge, load_model, measured, read_job, transformers_logits, unknown_method
from transformers import PreTrainedModel


def dequantized(job: Job, quantized: BaseQModel) -> PreTrainedModel:
    """The model with the weights that a written checkpoint stands for, as the library itself reads it.

    Its own kernels compute in 16 bits, and the drift of that is not the weights'.
    """
    model = load_model(job)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        quantized.save(folder)
        read = GPTQModel.load(folder, backend=BACKEND.TORCH, device="cpu")
        found = {name: one for name, one in read.model.named_modules() if isinstance(one, BaseQuantLinear)}
        assert len(found) == len(model.model.layers) * {"mlp": 3, "linears": 7}[job.scope]
        for name, module in found.items():
            model.get_submodule(name).weight.copy_(module.dequantize_weight().T)
    return model


def main() -> None:
    job = read_job()
    if job.method not in ("gptq", "gptaq"):
        raise unknown_method(job)
    bits, group_size, symmetric = job.integers
    with measured() as costs:
        quantized = GPTQModel.load(
            job.checkpoint,
            QuantizeConfig(
                bits=bits,
                group_size=group_size,
                sym=symmetric,
                dynamic={r"-:.*self_attn.*": {}} if job.scope == "mlp" else None,
                gptaq=GPTAQConfig() if job.method == "gptaq" else None,
                offload_to_disk=False,
            ),
            device="cpu",
            dtype=torch.float32,
        )
        ids = job.calibration.tolist()
        quantized.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids])
    judge(job, "gptqmodel", costs, transformers_logits(dequantized(job, quantized)))


if __name__ == "__main__":
    main()
