from pathlib import Path

import pytest
import torch

from qtool.calibrate.experts import expert_of, mixtures, routers, showing_all
from qtool.calibrate.layers import LayerRunner, checkpoint_weights
from qtool.calibrate.statistics import Collector
from qtool.core.checkpoint import Checkpoint
from tests.calibrate.test_layers import expected_hidden, last_hidden, windows_of
from tests.mixtures import CONFIGS, write_mixture

TOP_K = {"mixtral": 2, "qwen3-moe": 3}


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_of_linears_make_what_transformers_experts_make(family: str, tmp_path: Path) -> None:
    folder, windows = write_mixture(family, tmp_path), windows_of(37)
    hidden = last_hidden(LayerRunner(Checkpoint(folder)), windows)
    # The same sums in float32, in another order.
    assert torch.allclose(hidden, expected_hidden(folder, windows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_linears_and_routers_have_the_names_that_are_stored(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_mixture(family, tmp_path))
    runner = LayerRunner(checkpoint)
    linears, stored = runner.linears(), {name.removesuffix(".weight") for name in checkpoint}
    assert linears.keys() <= stored
    assert {name for name in linears if expert_of(name)} == {name for name in stored if ".experts." in name}
    assert set(routers(runner.model)) == {name for name in stored if name.endswith(".gate")}
    assert not linears.keys() & set(routers(runner.model))


def test_an_expert_has_a_name_of_its_own() -> None:
    assert expert_of("model.layers.1.mlp.experts.12.up_proj") == "model.layers.1.mlp.experts.12"
    assert expert_of("model.layers.1.mlp.up_proj") is None


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_see_the_tokens_that_chose_them_or_all_with_the_same_output(
    family: str, tmp_path: Path
) -> None:
    runner, windows = LayerRunner(Checkpoint(write_mixture(family, tmp_path))), windows_of(19)
    hidden, seen, outputs = runner.embed(windows), [], []
    downs = {name: one for name, one in runner.linears().items() if name.endswith(("w2", ".down_proj"))}
    chosen = {
        name: one for name, one in downs.items() if (expert_of(name) or "").startswith("model.layers.0.")
    }
    for forced in (False, True):
        collector = Collector()
        with runner.layer(0, checkpoint_weights(runner.checkpoint)) as layer, collector.watching(chosen):
            if forced:
                with showing_all(layer):
                    outputs.append(torch.cat(list(runner.run(0, hidden))))
            else:
                outputs.append(torch.cat(list(runner.run(0, hidden))))
        seen.append({name: one.tokens for name, one in collector.statistics().items()})
    routed, all_of_them = seen
    assert sum(routed.values()) == TOP_K[family] * windows.numel()
    assert len(set(routed.values())) > 1
    assert set(all_of_them.values()) == {windows.numel()}
    assert len(all_of_them) == len(chosen)
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_router_computes_in_float32_whatever_the_rest_does(tmp_path: Path) -> None:
    runner = LayerRunner(Checkpoint(write_mixture("mixtral", tmp_path)))
    with runner.layer(0, checkpoint_weights(runner.checkpoint)) as layer:
        ((name, _),) = mixtures(layer)
        router, x = layer.get_submodule(f"{name}.gate"), torch.randn(7, 96)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = router(x)[0]
        assert rounded.dtype == torch.float32
        assert torch.equal(rounded, router(x)[0])
