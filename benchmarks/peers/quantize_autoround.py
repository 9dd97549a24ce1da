"""AutoRound, with its defaults where the job says nothing. The method is its number of iterations: 200."""

from auto_round import AutoRound
from auto_round.algorithms.quantization.sign_round.config import SignRoundConfig
from auto_round.schemes import QuantizationScheme
from quantize_job import judge, load_model, measured, read_job, transformers_logits
from transformers import AutoTokenizer


def main() -> None:
    job = read_job()
    bits, group_size, symmetric = job.integers
    with measured() as costs:
        tuner = AutoRound(
            load_model(job),
            AutoTokenizer.from_pretrained(job.checkpoint),  # it insists, though the windows are tokens
            scheme=QuantizationScheme(bits=bits, group_size=group_size, sym=symmetric, data_type="int"),
            ignore_layers="self_attn" if job.scope == "mlp" else "",
            dataset=list(job.calibration.split(8)),
            alg_configs=SignRoundConfig(iters=int(job.method)),
            nsamples=job.num_samples,
            seqlen=job.seq_len,
            amp=False,  # a processor without bfloat16 would only lose time and precision
            device_map="cpu",
        )
        model, _ = tuner.quantize()
    judge(job, "auto-round", costs, transformers_logits(model))


if __name__ == "__main__":
    main()
