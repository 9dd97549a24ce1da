"""Training draft heads: it learns, it resumes with the same bytes, and what it writes drafts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qtool.compile.heads.config import HeadKind
from qtool.compile.heads.head import read_head
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.request import SamplingParams
from qtool.runtime.speculation.heads import open_heads
from qtool.runtime.speculation.training.corpus import CorpusOptions, read_seeds
from qtool.runtime.speculation.training.features import collect, hidden_of, read_shard
from qtool.runtime.speculation.training.network import Batch, Network
from qtool.runtime.speculation.training.run import Course, train_head
from qtool.runtime.speculation.training.start import HeadOptions, fit_start, frequent_tokens
from qtool.runtime.speculation.training.train import TrainOptions, TrainReport, mean_length
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.heads import seeded_head
from tests.runtime.test_draft_heads import serve

TEXT = Path(__file__).read_text(encoding="utf-8")[:8000]


class KilledError(Exception):
    """Stands for kill -9: nothing is cleaned up."""


@pytest.fixture
def course(tmp_path: Path) -> Callable[..., Course]:
    def make(kind: HeadKind, epochs: float = 2) -> Course:
        lines = [{"text": TEXT}, *({"messages": [{"role": "user", "content": f"{n} and"}]} for n in range(8))]
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Course(
            HeadOptions(kind, draft_vocab_size=300, num_heads=2),
            CorpusOptions(seq_len=48, own_share=0.5, max_sequences=100),
            TrainOptions(epochs=epochs, depth=2, save_every=3, learning_rate=3e-3),
            str(data),
        )

    return make


def run(tiny: Path, course: Course, output: Path, *, die_at: tuple[str, int] | None = None) -> TrainReport:
    def told(part: str, done: int, total: int, word: str) -> None:
        if (part, done) == die_at:
            raise KilledError

    return train_head(tiny, open_engine(tiny, kv_cache_tokens=4096), course, output, told)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_training_loses_less_and_the_heads_serve(
    kind: HeadKind, tiny: Path, tmp_path: Path, course: Callable[..., Course]
) -> None:
    chosen = course(kind, 1)
    before = run(
        tiny, replace(chosen, training=replace(chosen.training, epochs=0.01)), tmp_path / "untrained"
    )
    after = run(tiny, replace(chosen, training=replace(chosen.training, epochs=4)), tmp_path / "heads")
    assert after.loss < 0.97 * before.loss
    assert len(after.acceptance) == 2  # of which a random model's answers, which are noise, say nothing
    assert not (tmp_path / "heads.partial").exists()
    head = read_head(tmp_path / "heads")
    assert (head.config.kind, head.config.draft_vocab_size) == (kind, 300)
    params = SamplingParams(max_tokens=20, temperature=0)
    engine = open_engine(tiny, kv_cache_tokens=320)
    plain = serve(open_engine(tiny, kv_cache_tokens=320), None, params)
    assert serve(engine, open_heads(tmp_path / "heads", engine), params) == plain


@pytest.mark.parametrize("die_at", [("collecting", 2), ("training", 8)])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(
    die_at: tuple[str, int], tiny: Path, tmp_path: Path, course: Callable[..., Course]
) -> None:
    chosen = course("eagle")
    run(tiny, chosen, tmp_path / "whole")
    with pytest.raises(KilledError):
        run(tiny, chosen, tmp_path / "killed", die_at=die_at)
    assert not (tmp_path / "killed").exists()
    with pytest.raises(UsageError, match="was begun with another set of options; give"):
        run(tiny, replace(chosen, head=HeadOptions("medusa")), tmp_path / "killed")
    run(tiny, chosen, tmp_path / "killed")
    for name in ("head.json", "head.safetensors", "training.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    "file", ["features/part-00001.safetensors", "alone.safetensors", "training-00000006.pt"]
)
def test_a_kept_file_that_is_damaged_is_made_anew_to_the_same_bytes(
    file: str, tiny: Path, tmp_path: Path, course: Callable[..., Course], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = course("eagle")
    run(tiny, chosen, tmp_path / "whole")
    with pytest.raises(KilledError):
        run(tiny, chosen, tmp_path / "killed", die_at=("training", 8))
    kept = tmp_path / "killed.partial" / file
    content = bytearray(kept.read_bytes())
    content[-len(content) // 3] ^= 1  # among the numbers: no reader would notice
    kept.write_bytes(content)
    run(tiny, chosen, tmp_path / "killed")
    assert [record.getMessage() for record in caplog.records] == [f"{kept}: is damaged; it is made anew"]
    for name in ("head.json", "head.safetensors", "training.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_others_put_beside_the_work_stays_and_is_named(
    tiny: Path, tmp_path: Path, course: Callable[..., Course], caplog: pytest.LogCaptureFixture
) -> None:
    chosen, folder = course("eagle"), tmp_path / "heads.partial"
    with pytest.raises(KilledError):
        run(tiny, chosen, tmp_path / "heads", die_at=("training", 8))
    foreign = [folder / name for name in ("features/part-99999.safetensors", "thesis.txt", "training-old.pt")]
    for file in foreign:
        file.write_bytes(b"years of work")
    run(tiny, chosen, tmp_path / "heads")
    assert sorted(file for file in folder.rglob("*") if file.is_file()) == foreign
    assert "heads.partial: is left, since it holds features/part-99999.safetensors and 2 more" in caplog.text


def test_sequences_are_text_or_the_models_own_answers_with_its_hidden_states(
    tiny: Path, tmp_path: Path
) -> None:
    tokenizer, engine = Tokenizer.load(tiny), open_engine(tiny, kv_cache_tokens=4096)
    options = CorpusOptions(seq_len=40, own_share=0.5, max_sequences=33)
    seeds = read_seeds(tokenizer, [TEXT, [{"role": "user", "content": "hi"}]], options)
    assert seeds == read_seeds(tokenizer, [TEXT, [{"role": "user", "content": "hi"}]], options)
    assert {len(seed.tokens) for seed in seeds if not seed.own} == {40}
    assert 10 in {len(seed.tokens) for seed in seeds if seed.own}
    shards = collect(engine, seeds, options, frozenset(), tmp_path / "features", lambda: None)
    examples = [example for shard in shards for example in read_shard(shard)]
    assert len(examples) == len(seeds) == 33
    for seed, example in zip(seeds, examples, strict=True):
        assert len(example.tokens) == 40
        assert example.num_given == (len(seed.tokens) if seed.own else 0)
        assert tuple(example.tokens[: len(seed.tokens)].tolist()) == seed.tokens
    exact = hidden_of(engine, examples[0].tokens.tolist())
    assert np.abs(examples[0].hidden.numpy() - exact).max() < 1e-2 * np.abs(exact).max()  # kept in float16
    greedy = next(place for place, seed in enumerate(seeds) if seed.own and place % 2 == 0)
    answer = serve_one(tiny, list(seeds[greedy].tokens), 40 - len(seeds[greedy].tokens))
    assert examples[greedy].tokens[len(seeds[greedy].tokens) :].tolist() == answer


def serve_one(tiny: Path, prompt: list[int], count: int) -> list[int]:
    from qtool.runtime.loop import EngineLoop
    from qtool.runtime.scheduler import SchedulerConfig

    loop = EngineLoop(open_engine(tiny, kv_cache_tokens=320), SchedulerConfig(), lambda _: None)
    loop.submit([prompt], SamplingParams(max_tokens=count, temperature=0))
    tokens: list[int] = []
    while loop.receive(wait=False):
        tokens += [output.token for output in loop.step() if output.token is not None]
    return tokens


def test_the_frequent_tokens_come_first_and_low_ids_fill_up() -> None:
    assert frequent_tokens([[7, 7, 3], [9, 7, 3]], 2, 20).tolist() == [3, 7]
    assert frequent_tokens([[7, 7, 3]], 4, 20).tolist() == [0, 1, 3, 7]


def test_the_mean_length_counts_the_targets_own_token() -> None:
    assert mean_length([]) == 1
    assert mean_length([0.5, 0.5]) == 1.75


def test_too_little_text_is_said(tiny: Path, tmp_path: Path, course: Callable[..., Course]) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(UsageError, match=r"makes no sequence of 48 tokens: it has \d+ tokens of text; give"):
        run(tiny, replace(course("eagle"), data=str(tmp_path / "short.txt")), tmp_path / "heads")
    chat = {"messages": [{"role": "user", "content": "a question of many words " * 20}]}
    (tmp_path / "long.jsonl").write_text(json.dumps(chat) + "\n")
    with pytest.raises(UsageError, match=r"of 1 chats the shortest takes \d+; .* or a --seq-len of \d+ or"):
        run(tiny, replace(course("eagle"), data=str(tmp_path / "long.jsonl")), tmp_path / "heads")
    assert not (tmp_path / "heads.partial").exists()


def test_more_tokens_of_a_head_than_the_model_has_are_refused_at_once(
    tiny: Path, tmp_path: Path, course: Callable[..., Course]
) -> None:
    chosen = replace(course("medusa"), head=HeadOptions("medusa", draft_vocab_size=321))
    with pytest.raises(UsageError, match="--draft-vocab is 321, and the model has 320 tokens; give 320 at"):
        run(tiny, chosen, tmp_path / "heads")
    assert not (tmp_path / "heads.partial").exists()


def test_training_that_diverges_ends_and_writes_no_heads(
    tiny: Path, tmp_path: Path, course: Callable[..., Course]
) -> None:
    chosen = course("medusa", 2)
    wild = replace(chosen, training=replace(chosen.training, learning_rate=1e30))
    with pytest.raises(QtoolError, match=r"diverged: at step \d+ .* --learning-rate below 1e\+30"):
        run(tiny, wild, tmp_path / "heads")
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize("epochs", [0.0, float("nan"), float("inf"), 1e300])
def test_a_number_of_epochs_that_never_ends_is_refused(epochs: float) -> None:
    with pytest.raises(UsageError, match=r"epochs: is .*; wanted more than 0"):
        TrainOptions(epochs)


def test_eagle_learns_its_output_matrix_and_no_embeddings_and_medusa_neither(
    tiny: Path, tmp_path: Path, course: Callable[..., Course]
) -> None:
    table = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    tensors = {}
    for name, kind, epochs in (("short", "eagle", 0.2), ("long", "eagle", 1), ("medusa", "medusa", 0.2)):
        run(tiny, course(kind, epochs), tmp_path / name)
        tensors[name] = load_file(tmp_path / name / "head.safetensors")
    assert torch.equal(tensors["short"]["embed_tokens.weight"], tensors["long"]["embed_tokens.weight"])
    outputs = {
        name: (found["lm_head.weight"], table[found["draft_tokens"].long()].half())
        for name, found in tensors.items()
    }
    assert not torch.equal(*outputs["short"])
    assert torch.allclose(*outputs["short"], atol=0.05)  # a few steps from where it began
    assert not torch.equal(outputs["short"][0], outputs["long"][0])
    assert torch.equal(*outputs["medusa"])


def test_prompts_are_neither_learned_nor_counted(tiny: Path) -> None:
    """What comes before an answer changes what is drafted in it, but not which drafts count."""
    head = seeded_head(tiny, "eagle")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 320, (1, 20), generator=generator)
    hidden = torch.randn(1, 20, 96, generator=generator)
    network = Network(
        head.config, head.tensors, torch.randn(320, 96, generator=generator), torch.device("cpu")
    )
    counted = torch.arange(20)[None] >= 15
    losses = []
    for target in (hidden, torch.cat([hidden[:, :14] * 3, hidden[:, 14:]], dim=1)):
        losses.append(network.loss(Batch(tokens, hidden, target, counted), 2).item())
    assert losses[0] == losses[1]
    every = network.loss(Batch(tokens, hidden, hidden, counted | True), 2).item()
    assert every != losses[0]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_products_in_bfloat16_lose_what_those_in_float32_do(tiny: Path, kind: HeadKind) -> None:
    """Whatever the checkpoint's dtype is: embeddings and output matrix keep it in a head."""
    head = seeded_head(tiny, kind)
    tensors = {
        n: tensor.half() if tensor.is_floating_point() else tensor for n, tensor in head.tensors.items()
    }
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 320, (2, 20), generator=generator)
    final = torch.randn(2, 20, 96, generator=generator)
    features = torch.randn(2, 20, 96 * len(head.config.hidden_layers), generator=generator)
    network = Network(
        head.config, tensors, torch.randn(320, 96, generator=generator) / 10, torch.device("cpu")
    )
    batch = Batch(tokens, features, final, torch.ones(2, 20, dtype=torch.bool))
    exact = network.loss(batch, 2)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network.loss(batch, 2)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.01)
    assert rounded.item() != exact.item()


def test_the_start_finds_what_a_token_adds_to_the_feature_before_it(tiny: Path) -> None:
    """Of features that are a linear map of the last and something of each token's own, which has nothing to
    do with its embedding, all but what too few tokens tell."""
    generator = torch.Generator().manual_seed(0)
    head = seeded_head(tiny, "eagle")
    carried = 0.5 * torch.eye(96)
    own, alone = torch.randn(320, 96, generator=generator), torch.randn(320, 96, generator=generator)

    def batch() -> Batch:
        tokens = torch.randint(0, 320, (64, 200), generator=generator)
        finals = [torch.randn(64, 96, generator=generator)]
        for place in range(1, 200):
            finals.append(finals[-1] @ carried.T + own[tokens[:, place]])
        final = torch.stack(finals, dim=1)
        return Batch(tokens, final, final, torch.ones_like(tokens, dtype=torch.bool))

    learned, fresh = [batch(), batch()], batch()
    fitted = fit_start(head, alone, lambda: learned)
    inputs = torch.cat([fitted.tensor("embed_tokens.weight")[fresh.tokens[:, 1:]], fresh.final[:, :-1]], -1)
    error = inputs @ fitted.tensor("fc.weight").T - fresh.final[:, 1:]
    # each token was seen 80 times: a fifth of what is its own is held back, 4 % of its square
    assert error.square().mean() < 0.06 * own.square().mean()
