"""GGUF files: turned once into a Hugging Face folder, which is what every other room reads."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from qtool.core.cache import build_once, cache_folder
from qtool.core.files import sha256
from qtool.errors import QtoolError, UsageError

if TYPE_CHECKING:
    from gguf import GGUFReader

# The tokens that end an answer: a GGUF file may give a chat turn its own end, beside the text's.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def from_gguf(path: Path) -> Path:
    """The Hugging Face folder of a GGUF file, converted on first use into the cache.

    The file's sha256 is its name there, so a changed file is converted anew.
    Raises UsageError when `path` is no GGUF file, QtoolError when its architecture cannot be converted.
    """
    return build_once(cache_folder() / "gguf" / sha256(path), lambda folder: convert(path, folder))


def convert(path: Path, folder: Path) -> None:
    """Write a GGUF file's weights, config, tokenizer, chat template and generation config to `folder`.

    Quantized weights become float16: their scales are float16 in the file, so they fit its range, and
    its rounding (2^-11 of a weight) stays below a hundredth of a 4-bit step. Files of bfloat16 or
    float32 weights keep that dtype. The dense model is held in memory once.
    """
    reader = _open(path)
    with TemporaryDirectory(prefix="qtool-gguf-") as alone:
        # transformers would also read a config or a tokenizer that lies beside the file
        (Path(alone) / "model.gguf").symlink_to(path.absolute())
        try:
            _convert(Path(alone), reader, folder)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise QtoolError(
                f"{path}: transformers cannot convert this GGUF file ({error}); "
                "use the model's Hugging Face folder instead"
            ) from error
    _check_weights(path, folder)


def _open(path: Path) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise UsageError(f"{path}: is truncated or no GGUF file ({error}); fetch it again") from error


def _convert(alone: Path, reader: "GGUFReader", folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if (parts := _field(reader, "split.count") or 1) > 1:
        raise ValueError(f"it is one of {parts} parts; merge them with 'llama-gguf-split --merge' first")
    tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")
    _check_vocabulary(reader, tokenizer)
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    model = AutoModelForCausalLM.from_pretrained(
        alone,
        gguf_file="model.gguf",
        dtype=getattr(torch, _dtype(reader)),
        quantization_config=GgufConfig(dequantize=True),
    )
    _check_nothing_dropped(reader, model)
    ends = list(dict.fromkeys(end for key in _END_KEYS if (end := _field(reader, key)) is not None))
    if ends:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone, and a cache may be shared


def _field(reader: "GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _dtype(reader: "GGUFReader") -> str:
    """The name of the torch dtype that the matrices are stored in."""
    types = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "bfloat16" if types <= {"BF16", "F32"} else "float16"


def _check_vocabulary(reader: "GGUFReader", tokenizer: Any) -> None:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    converted = tokenizer.convert_ids_to_tokens(range(len(tokens)))
    for index, (wanted, got) in enumerate(zip(tokens, converted, strict=True)):
        if wanted != got:
            raise ValueError(f"token {index} is {wanted!r} in the file and {got!r} in its tokenizer")


def _check_nothing_dropped(reader: "GGUFReader", model: Any) -> None:
    """transformers skips tensors and rope scaling that it has no place for, and makes up what is missing."""
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    loaded = sum(parameter.numel() for parameter in model.parameters())  # a tied one counts once
    if stored != loaded:
        known = "; it has rope_freqs, which scale the rope of Llama 3" if _has(reader, "rope_freqs") else ""
        raise ValueError(f"of its {stored} weights {loaded} would arrive{known}")
    scaling = _field(reader, f"{_field(reader, 'general.architecture')}.rope.scaling.type")
    rope = getattr(model.config, "rope_parameters", None) or {}
    if scaling not in (None, "none", rope.get("rope_type")):
        raise ValueError(f"its rope scaling {scaling!r} would be lost")


def _has(reader: "GGUFReader", prefix: str) -> bool:
    return any(tensor.name.startswith(prefix) for tensor in reader.tensors)


def _check_weights(path: Path, folder: Path) -> None:
    """Refuse weights that did not survive, such as values beyond float16's range."""
    from qtool.core.checkpoint import Checkpoint

    checkpoint = Checkpoint(folder)
    for name in checkpoint:
        if not bool(checkpoint.tensor(name).isfinite().all()):
            raise QtoolError(f"{path}: tensor {name} has values that are not finite once converted")
