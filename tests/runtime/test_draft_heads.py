"""Draft heads as drafters: they draft what they were trained to, and no answer is another by them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.compile.backends.reference import Tokens
from qtool.compile.build import compile_engine, find_draft
from qtool.compile.engine import read_spec
from qtool.compile.heads.config import HeadKind
from qtool.compile.heads.eagle import draft
from qtool.compile.heads.head import TOKENS, Head, read_head
from qtool.compile.heads.openvino import _Rounded
from qtool.compile.heads.reference import DraftTraining, Unrolled
from qtool.compile.heads.target import weight_digests
from qtool.core.checkpoint import Checkpoint
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine, Floats, Step
from qtool.runtime.loop import EngineLoop
from qtool.runtime.request import SamplingParams, SequenceState
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation import tree
from qtool.runtime.speculation.build import SpeculationConfig, make_speculator
from qtool.runtime.speculation.choosing import Chooser
from qtool.runtime.speculation.contract import ROOT, Draft, Drafter, DraftRequest, Seen
from qtool.runtime.speculation.draft_openvino import OpenVinoLayer
from qtool.runtime.speculation.draft_torch import TorchLayer
from qtool.runtime.speculation.eagle import EagleDrafter
from qtool.runtime.speculation.heads import open_heads, warn_of_another
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.speculation.training.features import hidden_of
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.heads import seeded_head

KINDS: list[HeadKind] = ["medusa", "eagle", "eagle3"]
TOKENS_A = np.random.default_rng(0).integers(0, 320, 40).tolist()
PROMPTS = [TOKENS_A[:23], TOKENS_A[5:9], TOKENS_A[3:40]]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Path:
    """Heads of the kind that the test asks for."""
    path = tmp_path / "heads"
    path.mkdir()
    seeded_head(tiny, request.param).save(path)
    return path


def step_of(
    tokens: list[int], positions: list[int], past: int, masks: list[np.ndarray] | None = None
) -> Step:
    every = np.arange(len(tokens), dtype=np.int32)
    return Step(
        token_ids=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        past_lens=np.array([past], np.int32),
        new_lens=np.array([len(tokens)], np.int32),
        block_tables=[[2, 0, 1]],
        logit_rows=every,
        hidden_rows=every,
        masks=masks,
    )


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_what_is_trained_is_what_is_drafted(kind: HeadKind, tiny: Path) -> None:
    """Row 11 of the unrolled training, against the layer that drafts three tokens after twelve features."""
    head = seeded_head(tiny, kind)
    generator = np.random.default_rng(3)
    features = generator.normal(size=(20, 96)).astype(np.float32)
    tokens = generator.integers(0, 320, 24).tolist()
    layer, past, row = TorchLayer(head, num_tokens=96), Unrolled(), 11
    result = layer.run(step_of(tokens[1 : row + 2], list(range(1, row + 2)), 0), features[: row + 1])
    drafted = [(result.logits[-1], result.hidden[-1])]
    for ahead in (1, 2):
        place = row + 1 + ahead
        result = layer.run(step_of([tokens[place]], [place], row + ahead), drafted[-1][1][None])
        drafted.append((result.logits[0], result.hidden[0]))
    given, every = torch.from_numpy(features), torch.arange(20)
    for ahead, (logits, feature) in enumerate(drafted):
        places = torch.arange(20) + 1 + ahead
        step = Tokens(torch.tensor(tokens)[places], places, every, every)
        unrolled = draft(head.config, head, DraftTraining(step, 1, given, past))
        given = unrolled.hidden[0]
        assert np.allclose(unrolled.logits[row].detach(), logits, atol=1e-3)
        assert np.allclose(given[row].detach(), feature, atol=1e-3)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_compiled_layer_is_the_torch_one_with_weights_and_inputs_in_8_bits(
    kind: HeadKind, tiny: Path, tmp_path: Path
) -> None:
    head = seeded_head(tiny, kind)
    rounded = _Rounded(head)
    tensors = {
        name: rounded.linear(name.removesuffix(".weight")).dense()
        if name.endswith(("_proj.weight", "fc.weight", "lm_head.weight"))
        else tensor
        for name, tensor in head.tensors.items()
    }
    head_folder, engine = tmp_path / "heads", tmp_path / "engine"
    head_folder.mkdir()
    head.save(head_folder)
    compile_engine(tiny, "openvino", engine, draft=find_draft(head_folder))
    with pytest.raises(UsageError, match=r"draft: holds heads that are compiled .* were compiled from"):
        find_draft(engine / "draft")
    as_compiled = OpenVinoLayer(engine / "draft", num_tokens=96)
    read_spec(engine / "draft").model_copy(update={"openvino": None}).save(engine / "draft")
    unrounded = OpenVinoLayer(engine / "draft", num_tokens=96)
    exactly = TorchLayer(Head(head.config, tensors), num_tokens=96)
    features = np.random.default_rng(1).normal(size=(20, 96)).astype(np.float32)
    mask = np.tri(4, dtype=np.bool_)
    mask[2, 1] = mask[3, 2] = False
    for step, part in (
        (step_of(TOKENS_A[:14], list(range(14)), 0), features[:14]),
        (step_of(TOKENS_A[14:15], [14], 14), features[14:15]),
        (step_of(TOKENS_A[15:19], [15, 16, 16, 17], 15, [mask]), features[15:19]),
    ):
        exact = exactly.run(step, part)
        # inputs rounded to 8 bits are off by a 254th of the largest beside them, in each of the linears
        for layer, share in ((unrounded, 1e-3), (as_compiled, 0.05)):
            compiled = layer.run(step, part)
            assert np.abs(compiled.logits - exact.logits).max() < share * np.abs(exact.logits).max()
            assert np.abs(compiled.hidden - exact.hidden).max() < share * np.abs(exact.hidden).max()


def serve(engine: Engine, drafter: Drafter | None, params: SamplingParams, **limits: int) -> list[list[int]]:
    speculator = None
    if drafter is not None:
        speculator = Speculator([drafter], None, engine.vocab_size, num_tokens=4)
    config = SchedulerConfig(**{"max_num_seqs": 3, "max_num_batched_tokens": 16, **limits})
    loop = EngineLoop(engine, config, lambda _: None, speculator=speculator)
    answers: dict[int, list[int]] = {number: [] for number in loop.submit(PROMPTS, params)}
    while loop.receive(wait=False):
        for output in loop.step():
            assert output.error is None, output.error
            assert output.token is not None
            answers[output.request_id].append(output.token)
    return list(answers.values())


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_greedy_answers_are_those_without_heads(folder: Path, width: int, tiny: Path) -> None:
    """Prompts in chunks, sequences that decode beside them, and a pool too small for all at once."""
    params = SamplingParams(max_tokens=20, temperature=0)
    plain = serve(open_engine(tiny, kv_cache_tokens=160), None, params)
    engine = open_engine(tiny, kv_cache_tokens=160)
    drafter = open_heads(folder, engine, width=width)
    if isinstance(drafter, EagleDrafter):
        assert isinstance(drafter._layer, TorchLayer)
    assert serve(engine, drafter, params) == plain


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_compiled_heads_serve_beside_a_compiled_engine_seeded_and_penalized(
    folder: Path, tiny: Path, tmp_path: Path
) -> None:
    compile_engine(tiny, "openvino", tmp_path / "engine", draft=find_draft(folder))
    for params in (
        SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.2, logit_bias={7: 3.0}),
        SamplingParams(max_tokens=12, temperature=0.8, seed=3),
    ):
        plain = serve(open_engine(tmp_path / "engine", kv_cache_tokens=320, threads=1), None, params)
        engine = open_engine(tmp_path / "engine", kv_cache_tokens=320, threads=1)
        assert serve(engine, open_heads(tmp_path / "engine" / "draft", engine), params) == plain


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_drawn_drafts_come_from_the_distributions_that_they_name(folder: Path, tiny: Path) -> None:
    engine = open_engine(tiny, kv_cache_tokens=320)
    drafter = open_heads(folder, engine)
    known = set(seeded_head(tiny, drafter.name).tensors[TOKENS].tolist())  # type: ignore[arg-type]
    seen: list[int] = []
    propose = drafter.propose

    def check(requests: object) -> object:
        drafts = propose(requests)  # type: ignore[arg-type]
        for each in drafts:
            assert each.probs is not None or not each.tokens
            for token, probs in zip(each.tokens, each.probs or (), strict=True):
                seen.append(token)
                assert probs.shape == (320,)
                assert probs[token] > 0
                assert abs(probs.sum() - 1) < 1e-4
                assert set(np.flatnonzero(probs).tolist()) <= known
        return drafts

    drafter.propose = check  # type: ignore[method-assign, assignment]
    serve(engine, drafter, SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9))
    assert seen


@pytest.mark.parametrize("folder", ["eagle"], indirect=True)
def test_heads_say_what_they_need_of_an_engine(folder: Path, tiny: Path, tmp_path: Path) -> None:
    compile_engine(tiny, "openvino", tmp_path / "engine")
    engine = open_engine(tmp_path / "engine", kv_cache_tokens=64, threads=1)
    with pytest.raises(UsageError, match="read hidden states of final, and the engine gives none; compile"):
        open_heads(folder, engine)


@pytest.mark.parametrize("folder", ["eagle"], indirect=True)
def test_a_sequence_that_ended_leaves_nothing_in_the_layers_pool(folder: Path, tiny: Path) -> None:
    engine = open_engine(tiny, kv_cache_tokens=320)
    drafter = open_heads(folder, engine)
    assert isinstance(drafter, EagleDrafter)
    serve(engine, drafter, SamplingParams(max_tokens=9, temperature=0))
    assert drafter._blocks.num_free == drafter._blocks.num_blocks
    assert not drafter._lanes


def by_hand(head: Head, tokens: list[int], hidden: Floats, path: Sequence[int]) -> list[list[int]]:
    """The head's tokens, the likeliest first, after `tokens`, whose hidden states but the last's are known,
    and then after each token of `path`: by the layer alone."""
    features = hidden
    if head.config.kind == "eagle3":
        features = hidden @ head.tensors["fc.weight"].float().numpy().T
    layer, known = TorchLayer(head, num_tokens=96), head.tensors[TOKENS].numpy()
    end = len(tokens)
    result = layer.run(step_of(tokens[1:], list(range(1, end)), 0), features.astype(np.float32))
    ranked = [known[(-result.logits[-1]).argsort(kind="stable")].tolist()]
    for place, token in enumerate(path):
        result = layer.run(step_of([token], [end + place], end - 1 + place), result.hidden[-1:])
        ranked.append(known[(-result.logits[-1]).argsort(kind="stable")].tolist())
    return ranked


def paths(draft: Draft) -> list[list[int]]:
    """The tokens from the root to each token of a draft."""
    found: list[list[int]] = []
    for place, token in enumerate(draft.tokens):
        parent = place - 1 if draft.parents is None else draft.parents[place]
        found.append([*(found[parent] if parent != ROOT else []), token])
    return found


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("folder", ["eagle", "eagle3"], indirect=True)
def test_drafts_are_those_of_the_whole_text_whatever_came_before(
    folder: Path, width: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After chunks, rejections and preemption: what a drafter proposes that sees the text for the first time,
    and what the layer says by hand along each path."""
    monkeypatch.setattr(tree, "_LEAST", -np.inf)
    engine, witness = (open_engine(tiny, kv_cache_tokens=160) for _ in range(2))
    drafter, head = open_heads(folder, engine, width=width), read_head(folder)
    propose, columns = drafter.propose, drafter._fuse.columns  # type: ignore[attr-defined]
    num_checked = 0

    def check(requests: Sequence[DraftRequest]) -> list[Draft]:
        nonlocal num_checked
        drafts = propose(requests)
        for request, found in zip(requests, drafts, strict=True):
            tokens = request.sequence.tokens
            if not found:
                continue
            hidden = hidden_of(witness, tokens[:-1])
            fresh = open_heads(folder, engine, width=width)
            state = copy(request.sequence)
            state.num_computed = len(tokens) - 1
            fresh.observe([Seen(state, len(tokens) - 1, hidden)])
            (anew,) = fresh.propose([replace(request, sequence=state)])
            assert (found.tokens, found.parents) == (anew.tokens, anew.parents)
            for path in paths(found):
                ranked = by_hand(head, tokens, hidden[:, columns], path)
                assert all(token in ranks[:width] for token, ranks in zip(path, ranked, strict=False))
            num_checked += 1
        return drafts

    drafter.propose = check  # type: ignore[method-assign]
    serve(engine, drafter, SamplingParams(max_tokens=16, temperature=0))
    assert num_checked > 20


def test_each_token_of_a_tree_sees_its_ancestors_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_LEAST", -np.inf)
    generator = np.random.default_rng(0)
    request = DraftRequest(SequenceState(0, [1, 2], SamplingParams(temperature=0)), 9)
    grown = tree.Tree(request, Chooser(np.arange(9, dtype=np.int32), 9), 3)
    grown.begin(generator.normal(size=9).astype(np.float32), np.zeros(2, np.float32))
    for _ in range(2):
        logits = generator.normal(size=(3, 9)).astype(np.float32)
        grown.grow(logits, np.zeros((3, 2), np.float32))
    mask, nodes = grown.rows().mask, grown._nodes
    assert {node.parent for node in nodes} - {ROOT}
    for place, node in enumerate(nodes):
        ancestors = set() if node.parent == ROOT else set(np.flatnonzero(mask[node.parent]).tolist())
        assert set(np.flatnonzero(mask[place]).tolist()) == ancestors | {place}


def test_a_tree_stops_growing_where_nothing_more_of_it_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_LEAST_GROWING", -np.inf)
    sequence = SequenceState(0, [1, 2], SamplingParams(temperature=0))

    def grown(seed: int, count: int, *, stops: bool) -> tuple[Draft, int]:
        def logits(path: Sequence[int]) -> Floats:
            return np.random.default_rng([seed, *path]).normal(0, 2, 9).astype(np.float32)

        feature, runs = np.zeros(2, np.float32), 1
        one = tree.Tree(
            DraftRequest(sequence, count), Chooser(np.arange(9, dtype=np.int32), 9), 3, whole=True
        )
        one.begin(logits([]), feature)
        while one.grows if stops else runs < 6:
            rows = [logits(one._path(place)) for place in one._frontier]
            one.grow(np.stack(rows), np.stack([feature] * len(rows)))
            runs += 1
        return one.draft(), runs

    runs = []
    for seed in range(30):
        for count in (2, 5):
            drafts = [grown(seed, count, stops=stops) for stops in (False, True)]
            assert drafts[0][0].tokens == drafts[1][0].tokens
            assert drafts[0][0].parents == drafts[1][0].parents
            runs.append(drafts[1][1])
    assert np.mean(runs) < 4


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_damaged_heads_are_refused_by_their_file_in_serving_and_compiling(
    folder: Path, tiny: Path, tmp_path: Path
) -> None:
    engine, file = open_engine(tiny, kv_cache_tokens=64), folder / "head.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    for damage, problem in (
        (lambda: file.write_bytes(whole[:-9]), "head.safetensors: .*truncated"),
        (lambda: save_file({**tensors, name: tensors[name] * float("nan")}, file), "NaN or infinity"),
        (lambda: file.unlink(), "head.safetensors: "),
    ):
        damage()
        with pytest.raises(QtoolError, match=problem):
            open_heads(folder, engine)
        with pytest.raises(QtoolError, match=problem):
            compile_engine(tiny, "reference", tmp_path / "engine", draft=find_draft(folder))
    with pytest.raises(UsageError, match=r"is a file; name the folder"):
        open_heads(folder / "head.json", engine)
    with pytest.raises(UsageError, match="does not exist"):
        open_heads(folder / "nowhere", engine)


@pytest.mark.parametrize("folder", ["medusa"], indirect=True)
def test_heads_of_another_checkpoint_are_told_of(
    folder: Path, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_head(folder).config
    for target, warned in ((weight_digests(Checkpoint(tiny)), 0), ({"model.safetensors": "0"}, 1), ({}, 0)):
        config.model_copy(update={"target": target}).save(folder)
        caplog.clear()
        warn_of_another(folder, tiny)
        assert len(caplog.records) == warned


@pytest.mark.parametrize("folder", ["eagle", "medusa"], indirect=True)
def test_a_number_of_tokens_means_that_number(folder: Path, tiny: Path) -> None:
    engine = open_engine(tiny, kv_cache_tokens=320)
    drafter = open_heads(folder, engine, whole=True)
    propose, lengths = drafter.propose, set[int]()

    def check(requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = propose(requests)
        lengths.update(
            min(request.num_tokens, drafter.max_tokens) - len(draft)
            for request, draft in zip(requests, drafts, strict=True)
        )
        return drafts

    drafter.propose = check  # type: ignore[method-assign]
    serve(engine, drafter, SamplingParams(max_tokens=20, temperature=0))
    assert lengths == {0}
    tokenizer = Tokenizer.load(tiny)
    for config, problem in (
        (SpeculationConfig("heads", folder, num_tokens=500), f"500, and {drafter.name} can draft"),
        (SpeculationConfig("ngram", num_tokens=100_000), "ngram can draft 12 at most"),
    ):
        with pytest.raises(UsageError, match=problem):
            make_speculator(config, SchedulerConfig(), engine, tokenizer, tiny)
    with pytest.raises(UsageError, match="speculative_tree is 400"):
        SpeculationConfig("heads", folder, tree_width=400)
