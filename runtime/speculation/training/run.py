"""From a checkpoint and text to trained draft heads, in a folder that a killed run goes on in."""

import json
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import torch

from qtool.calibrate.text import digest, load_records
from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.heads.target import weight_digests
from qtool.compile.hidden import FINAL, HiddenStates
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.files import new_folder, refuse_existing, resumable, write_text
from qtool.core.kept import begun, clear
from qtool.core.manifest import versions
from qtool.errors import UsageError
from qtool.runtime.engines.contract import Engine
from qtool.runtime.speculation.training.batches import Batches, watched
from qtool.runtime.speculation.training.corpus import CorpusOptions, read_seeds
from qtool.runtime.speculation.training.features import collect, hidden_alone, read_shard
from qtool.runtime.speculation.training.start import (
    FIT_EPOCHS,
    HeadOptions,
    draft_vocab_size,
    fit_start,
    frequent_tokens,
    layers_read,
    new_head,
    target_output,
)
from qtool.runtime.speculation.training.train import Told, TrainOptions, TrainReport, saved_states, train
from qtool.runtime.tokenizer import Tokenizer

REPORT = "training.json"
_PREFIX = (
    "There are many things that one can say about it, and about people, and some of them are as follows. "
)
"""Says nothing: the text before every token of the vocabulary when it is looked at alone."""


@dataclass(frozen=True)
class Course:
    """Everything that decides what heads become."""

    head: HeadOptions
    corpus: CorpusOptions
    training: TrainOptions
    data: str
    """A dataset, as in a recipe's calibration."""


def train_head(
    checkpoint: Path, engine: Engine, course: Course, output: Path, told: Told, device: str = "cpu"
) -> TrainReport:
    """Train heads for a checkpoint on what `engine`, which runs it, says; write them into the new `output`.

    ``OUTPUT.partial`` keeps hidden states and the state of training, so that a run that was killed goes on
    from its last saved step; that goes when all is done. Raises UsageError when `output` exists, when the
    folder was begun otherwise, for an engine that gives no hidden states, and for more tokens of a head than
    the model has.
    """
    refuse_existing(output)
    source = Checkpoint(checkpoint)
    config = read_config(source.config, str(checkpoint / "config.json"))
    given = _hidden_states(engine, config, course.head)
    draft_vocab = draft_vocab_size(course.head, config.vocab_size)
    weights, tokenizer = CheckpointWeights(config, source), Tokenizer.load(checkpoint)
    records = load_records(course.data)
    seeds = read_seeds(tokenizer, records, course.corpus)
    work = output.absolute().with_name(f"{output.name}.partial")
    decides = {
        "checkpoint": str(checkpoint.resolve()),
        "text": digest(records),
        "set of options": asdict(course),
    }
    with resumable(work), begun(work, decides):
        num_shards = -(-len(seeds) // 32)
        done = iter(range(1, num_shards + 1))
        shards = collect(
            engine,
            seeds,
            course.corpus,
            tokenizer.eos_token_ids,
            work / "features",
            lambda: told("collecting", next(done), num_shards, ""),
        )
        sequences = (example.tokens.tolist() for shard in shards for example in read_shard(shard))
        tokens = frequent_tokens(sequences, draft_vocab, config.vocab_size)
        head = new_head(course.head, config, weights, tokens)
        kept = list(shards)
        batches = Batches(shards, given, head.config.hidden_layers, course.training.batch_size)
        if course.head.kind == "eagle":
            fitted, num_steps = count(1), FIT_EPOCHS * batches.num_batches
            told("fitting", 0, num_steps, "")
            prefix = tokenizer.encode(_PREFIX, add_special_tokens=False)
            kept.append(work / "alone.safetensors")
            alone = hidden_alone(engine, prefix, kept[-1])
            head = fit_start(
                head,
                alone,
                lambda: watched(
                    batches.load(batches.epoch(0)), lambda: told("fitting", next(fitted), num_steps, "")
                ),
            )
        trained, report = train(
            head,
            target_output(config, weights),
            batches,
            course.training,
            work,
            told,
            torch.device(device),
        )
    trained = replace(trained, config=trained.config.model_copy(update={"target": weight_digests(source)}))
    with new_folder(output) as folder:
        trained.save(folder)
        record = {"course": asdict(course), "report": report.model_dump(), "versions": versions()}
        write_text(folder / REPORT, json.dumps(record, indent=2) + "\n")
    clear(work, [*kept, *saved_states(work)])
    return report


def _hidden_states(engine: Engine, config: DecoderConfig, options: HeadOptions) -> HiddenStates:
    given, wanted = engine.hidden_states, {*layers_read(options.kind, config), FINAL}
    if given is None or not wanted <= set(given.layers):
        names = ",".join(map(str, sorted(wanted, key=str)))
        raise UsageError(
            f"the engine gives hidden states of {given.layers if given else 'no layer'}, and heads learn "
            f"from {names}; compile it with --hidden-states {names}"
        )
    if (given.size, engine.vocab_size) != (config.hidden_size, config.vocab_size):
        raise UsageError("the engine was not compiled from this checkpoint: their sizes differ")
    return given
