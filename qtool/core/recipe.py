"""Recipes: what to quantize, how, on which text, judged by which gates, compiled for which targets."""

import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import regex
import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from qtool.core.recipe_problems import duplicate_keys, explain
from qtool.core.recipe_schemes import Activations, Frozen, IntWeights, KvCache, WeightFormat
from qtool.core.yaml_tree import invalid, read_tree
from qtool.errors import UsageError

_MATCH_SECONDS = 5.0
"""A name takes microseconds, unless a pattern tries the repeats in its repeats in every way."""


_Section = TypeVar("_Section", bound=Frozen)


class Calibration(Frozen):
    """The text that a model sees while its statistics are collected."""

    dataset: str = Field(
        "builtin:pydoc",
        description="builtin:NAME, a .txt or .jsonl file, or hub:OWNER/NAME[:SPLIT[:COLUMN]]",
    )
    num_samples: int = Field(128, ge=1, description="windows to run")
    seq_len: int = Field(512, ge=2, description="tokens in a window")
    seed: int = Field(0, ge=0, lt=2**63, description="chooses the windows")
    chat_template: bool = Field(False, description="render each record with the model's chat template")
    all_experts: bool = Field(
        False, description="let each expert of a mixture see every token, not only those that choose it"
    )


class _Method(Frozen):
    # the name tells the methods apart, so a mapping has to have it though code may leave it out
    model_config = ConfigDict(json_schema_extra={"required": ["name"]})


class Rtn(_Method):
    """Round to nearest, with the range that loses least in mean square."""

    name: Literal["rtn"] = "rtn"
    search_range: bool = Field(False, description="shrink each group's range to the least square error")


class Awq(_Method):
    """Activation-aware weight quantization: scale search, then clip search."""

    name: Literal["awq"] = "awq"
    grid: int = Field(20, ge=2, le=1000, description="steps of the scale search")
    clip: bool = Field(True, description="search a clip ratio for each group afterwards")


class GptqOptions(_Method):
    """What every method with GPTQ in it can be told."""

    block_size: int = Field(128, ge=1, description="columns between two lazy updates")
    damping: float = Field(0.01, gt=0, lt=1, description="of the Hessian's mean diagonal")
    activation_order: bool = Field(True, description="columns of the largest second moment first")
    search_range: bool = Field(True, description="shrink ranges by what their errors cost in the end")
    sweeps: int = Field(2, ge=0, le=100, description="times to refit scales and codes afterwards")
    correct: bool = Field(
        False,
        description="let each layer's last linear make up for the errors before it; "
        "takes twice the forward passes, and a second copy of the hidden states",
    )


class Gptq(GptqOptions):
    """GPTQ: round column by column, moving each column's error onto those still to come."""

    name: Literal["gptq"] = "gptq"


class AwqGptq(GptqOptions):
    """AWQ's scale search, then GPTQ."""

    name: Literal["awq+gptq"] = "awq+gptq"
    grid: int = Field(20, ge=2, le=1000, description="steps of the scale search")


class SmoothQuant(_Method):
    """SmoothQuant: move the range of loud inputs into the weights, then round to nearest."""

    name: Literal["smoothquant"] = "smoothquant"
    alpha: float | None = Field(
        None, ge=0, le=1, description="share of the inputs' range that weights take over; null: searched"
    )
    search_range: bool = Field(False, description="shrink each group's range to the least square error")


class Best(GptqOptions):
    """AWQ's scale search, then every way of rounding on each linear; the one of least output error stays."""

    name: Literal["best"] = "best"
    grid: int = Field(20, ge=2, le=1000, description="steps of the scale search")


def _by_name(method: Any) -> Any:
    return {"name": method} if isinstance(method, str) else method


AnyMethod = Rtn | Awq | Gptq | AwqGptq | SmoothQuant | Best
MethodName = Literal["rtn", "awq", "gptq", "awq+gptq", "smoothquant", "best"]
Method = Annotated[
    Annotated[AnyMethod, Field(discriminator="name")],
    BeforeValidator(_by_name, json_schema_input_type=MethodName | AnyMethod),
]
"""A method with its options, or its name alone for the default ones."""


def _compiles(pattern: str) -> str:
    if pattern.startswith("re:"):
        try:
            regex.compile(pattern[3:])
        except regex.error as error:
            raise ValueError(f"is not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""Matches a linear's full name: see `matches`."""


class Rule(Frozen):
    """Which linears are quantized, to which format, by which method."""

    targets: tuple[Pattern, ...] = Field(
        min_length=1, description="module patterns: a glob such as *.mlp.*, or re:REGEX"
    )
    weights: WeightFormat = IntWeights()
    activations: Activations | None = Field(None, description="null: inputs stay as they are")
    method: Method = Rtn()


class Budget(Frozen):
    """What the linears of `auto` may take or cost, all together: one of these."""

    average_bits: float | None = Field(
        None, gt=0, le=16, description="of a weight, scales and zero points counted in"
    )
    bytes: int | None = Field(None, gt=0, description="of the quantized weights as they are stored")
    max_kl: float | None = Field(None, gt=0, description="estimated KL(base || quantized), nats a token")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(limit is not None for limit in (self.average_bits, self.bytes, self.max_kl)) != 1:
            raise ValueError("wants exactly one of average_bits, bytes and max_kl")
        return self


class Auto(Frozen):
    """Linears that share a budget: each gets the number format with which all together lose least."""

    targets: tuple[Pattern, ...] = Field(min_length=1, description="as in a rule; rules go before")
    budget: Budget
    candidates: tuple[WeightFormat, ...] = Field(min_length=2, description="number formats to choose from")
    method: Method = Rtn()
    num_samples: int = Field(4, ge=1, description="calibration windows that sensitivity is estimated on")
    seq_len: int = Field(256, ge=2, description="tokens of each of them")


class Quantization(Frozen):
    """Rules in order, the first that matches a linear wins; `keep` wins over all of them."""

    rules: tuple[Rule, ...] = ()
    auto: Auto | None = Field(None, description="linears that share a budget of bits")
    kv_cache: KvCache | None = Field(None, description="null: keys and values stay as they are")
    keep: tuple[Pattern, ...] = Field(
        ("*.self_attn.*", "lm_head", "*.embed_tokens"), description="patterns that stay in full precision"
    )

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.rules and self.auto is None and self.kv_cache is None:
            raise ValueError("has neither rules, auto nor kv_cache, so nothing would be quantized")
        return self


class Gates(Frozen):
    """Limits on the drift from the unquantized model; null means no limit."""

    max_kl: float | None = Field(None, gt=0, description="mean KL(base || quantized), nats a token")
    max_kl_p99: float | None = Field(None, gt=0, description="99th percentile of the same")
    max_ppl_increase: float | None = Field(None, gt=0, description="relative: 0.05 allows 5 %")
    min_top1: float | None = Field(None, gt=0, le=1, description="share of positions with the same argmax")


class Evaluation(Frozen):
    """The text that a quantized model is judged on, and the limits it has to keep."""

    dataset: str = Field("builtin:pydoc-test", description="as in calibration; a text it has not seen")
    num_windows: int = Field(8, ge=1, description="windows from the start of the text")
    window_len: int = Field(1024, ge=2, description="tokens in a window")
    gates: Gates = Gates()


class OpenVinoOptions(Frozen):
    """What an OpenVINO engine may round while it computes, to be faster; by default nothing."""

    precision: Literal["f32", "bf16"] = Field(
        "f32", description="of what is computed; bf16 is for CPUs that multiply it faster, as with AMX"
    )
    dynamic_quantization: Literal[32, 64, 128] | None = Field(
        None,
        description="inputs of quantized linears that are rounded to int8 with one scale; null: not rounded",
    )


class TensorRtOptions(Frozen):
    """What a TensorRT engine is built for. Its limits become the bounds of the optimization profiles."""

    compute_capabilities: tuple[Annotated[int, Field(ge=10)], ...] = Field(
        (), description="GPUs to build for, 86 being 8.6; empty: those of tensorrt-rtx's default"
    )
    max_num_seqs: int = Field(16, ge=1, description="sequences that decode in one call")
    chunk: int = Field(256, ge=1, description="prompt tokens that one call computes")
    max_context: int | None = Field(None, ge=1, description="tokens of a sequence; null: the model's")
    draft_tokens: int = Field(
        4, ge=0, description="drafts, or nodes of a tree, that one call verifies; 0 builds no such profile"
    )
    zero_points: Literal["exact", "requantize"] = Field(
        "exact", description="asymmetric weights: a correction term, or rounded again without zero points"
    )
    attention: Literal["native", "plugin"] = Field(
        "native",
        description="plugin: qtool's fused kernel reads the KV pool in place; for target tensorrt alone",
    )
    keep_onnx: bool = Field(False, description="leave the graph that was compiled beside the engine")


class CompileTarget(Frozen):
    """An engine to build."""

    target: str = Field(description="openvino, onnx, tensorrt-rtx, tensorrt or reference")
    kv_cache: Literal["f32", "f16", "bf16", "u8"] | None = Field(
        None, description="null: the most exact that the target and its precision have"
    )
    openvino: OpenVinoOptions | None = Field(None, description="of target openvino alone")
    tensorrt: TensorRtOptions | None = Field(None, description="of the TensorRT targets alone")

    @model_validator(mode="after")
    def _options_have_a_use(self) -> Self:
        if self.tensorrt is not None and not self.target.startswith("tensorrt"):
            raise ValueError(f"tensorrt has no use for target {self.target}; drop it")
        if self.tensorrt is not None and self.tensorrt.attention == "plugin" and self.target != "tensorrt":
            raise ValueError(f"attention plugin has no use for target {self.target}, which has no plugins")
        if self.openvino is not None and self.target != "openvino":
            raise ValueError(f"openvino has no use for target {self.target}; drop it")
        return self


class Recipe(Frozen):
    """A recipe file, checked."""

    version: Literal[1] = 1
    description: str = ""
    model: str | None = Field(None, description="a checkpoint; the command line wins")
    calibration: Calibration = Calibration()
    quantization: Quantization
    evaluation: Evaluation = Evaluation()
    compile: tuple[CompileTarget, ...] = ()


def override(settings: _Section, **values: Any) -> _Section:
    """A part of a recipe with every value that is not None put in its place, and checked again."""
    changed = {name: value for name, value in values.items() if value is not None}
    try:
        return type(settings).model_validate({**settings.model_dump(), **changed})
    except ValidationError as error:
        problems = (
            f"{problem['loc'][0]}: {problem['msg'].replace('Input should', 'should')} "
            f"(got {problem['input']!r})"
            for problem in error.errors()
        )
        raise UsageError("; ".join(problems)) from error


def matches(pattern: str, module: str) -> bool:
    """Whether a module's full name fits a glob (``*`` crosses dots) or a ``re:`` pattern.

    Raises UsageError for a pattern whose repeats take too long to try.
    """
    if pattern.startswith("re:"):
        try:
            return regex.fullmatch(pattern[3:], module, timeout=_MATCH_SECONDS) is not None
        except TimeoutError as error:
            raise UsageError(
                f"pattern {pattern!r}: is not matched with {module} after {_MATCH_SECONDS} s; "
                "write it without repeats inside of repeats"
            ) from error
    return fnmatch.fnmatchcase(module, pattern)


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe file; UsageError lists everything that is wrong with it, a line each."""
    try:
        text = path.read_text(encoding="utf-8")
        tree, data = read_tree(str(path), text), yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); see 'qtool recipe list'") from error
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # bytes that are no text, dates and numbers beyond all limits
        raise invalid(str(path), error) from error
    problems = duplicate_keys(str(path), tree)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        problems += explain(str(path), tree, Recipe.model_json_schema(), error)
    if problems:
        raise UsageError("\n".join(problems))
    return recipe
