# SPDX-License-Identifier: Apache-2.0
"""The settings of the methods, and the adapters that fit a network."""

from collections import Counter

import pytest
import yaml

from perada.cli.runs import build_compared
from perada.studies.choose.candidates import (
    ADAPTERS,
    RATE_FACTORS,
    SETTINGS_OF_LEVEL,
    AdapterOption,
    check_adapter_of_recipe,
    fitting_adapters,
    make_candidates,
    make_levels,
)
from tests import recipes


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipes.recipe()))

    def configure(*words):
        return build_compared(["--config", str(path), "--trainer.logger=false", *words])

    return configure


def fits(cli):
    cli.datamodule.setup()
    return fitting_adapters(cli, cli.datamodule)


def test_fewer_settings_are_the_first_of_more(configured):
    cli = configured()
    many = make_candidates("ditto", cli, ADAPTERS, 20)
    assert len({str(candidate.point) for candidate in many}) == 20
    for number in (1, 3, 8):
        assert make_candidates("ditto", cli, ADAPTERS, number) == many[:number]
    assert many[0].point == {}


def test_methods_draw_the_same_adapters_and_rates(configured):
    cli = configured()
    ditto = make_candidates("ditto", cli, ADAPTERS, 9)
    fedavg = make_candidates("fedavg", cli, ADAPTERS, 9)
    for pulled, plain in zip(ditto[1:], fedavg[1:], strict=True):
        assert plain.point.items() <= pulled.point.items()
        assert set(pulled.point) - set(plain.point) == {"federated.algorithm.prox_strength"}


def test_rates_are_those_of_the_recipe_times_every_factor_about_equally_often(configured):
    cli = configured("--training.lr_local=0.2", "--training.lr_personal=0.05")
    candidates = make_candidates("ditto", cli, ADAPTERS, 1 + 2 * len(RATE_FACTORS))[1:]
    factors = Counter()
    for candidate in candidates:
        factor = float(candidate.point["training.lr_local"]) / 0.2
        assert float(candidate.point["training.lr_personal"]) / 0.05 == pytest.approx(factor)
        factors[round(factor, 6)] += 1
    # A setting that was drawn twice is left out, so one factor may be missing once.
    assert set(factors) == set(RATE_FACTORS)
    assert all(abs(count - 2) <= 1 for count in factors.values())


def test_a_resnet_has_residual_adapters_and_the_head(configured):
    adapters = fits(configured("--federated.algorithm=FedAvg"))
    assert AdapterOption("residual", 1) in adapters
    assert AdapterOption("head") in adapters
    assert not {"lora", "bottleneck"} & {option.adapter for option in adapters}


def test_fedbn_needs_an_adapter_with_norms(configured):
    adapters = fits(configured("--federated.algorithm=FedBN", "--model.adapter=residual"))
    assert adapters
    assert {option.adapter for option in adapters} == {"residual"}


def test_levels_have_one_adapter_each_from_the_cheapest_on_and_keep_drawn_settings(configured):
    cli = configured("--federated.algorithm=Ditto")
    adapters = fits(cli)
    drawn = make_candidates("ditto", cli, adapters, 9)
    # The recipe has the head, so its own setting is the first of the cheapest level.
    levels = make_levels("ditto", cli, adapters, own_fits=True, drawn=drawn)
    assert [level.adapter for level in levels] == [
        AdapterOption("head"),
        *(AdapterOption("residual", n) for n in (1, 2, 3)),
    ]
    assert levels[0].candidates[0] is drawn[0]
    for level in levels:
        factors = []
        for candidate in level.candidates:
            assert level is levels[0] or candidate.point.items() >= level.adapter.point().items()
            rate = float(candidate.point.get("training.lr_local", cli.loop.training.lr_local))
            factors.append(rate / cli.loop.training.lr_local)
        assert factors == pytest.approx([factor for factor, _ in SETTINGS_OF_LEVEL], rel=1e-3)
    new = [candidate for level in levels for candidate in level.candidates if candidate.number >= len(drawn)]
    assert [candidate.number for candidate in new] == list(range(9, 9 + len(new)))


def test_an_adapter_that_no_level_has_comes_last(configured):
    cli = configured("--federated.algorithm=FedAvg", "--model.adapter=residual")
    levels = make_levels("fedavg", cli, fits(cli), own_fits=True, drawn=make_candidates("fedavg", cli, ADAPTERS, 9))
    assert levels[-1].adapter is None
    assert levels[-1].candidates[0].point == {}


def test_a_method_that_cannot_train_the_recipes_adapter_says_why(configured):
    cli = configured("--federated.algorithm=FedBN", "--model.adapter=residual")
    cli.datamodule.setup()
    check_adapter_of_recipe(cli, cli.datamodule)
    head = configured("--federated.algorithm=FedBN", "--model.adapter=head")
    head.datamodule.setup()
    with pytest.raises(ValueError, match=r"FedBN|norm"):
        check_adapter_of_recipe(head, head.datamodule)
    assert [level.adapter for level in make_levels("fedbn", head, fits(head), own_fits=False, drawn=[])] == [
        AdapterOption("residual", n) for n in (1, 2, 3)
    ]


def test_a_transformer_has_lora_and_bottlenecks(configured):
    adapters = fits(configured("--federated.algorithm=FedAvg", "--model.backbone=test_vit", "--data.image_size=160"))
    kinds = {option.adapter for option in adapters}
    assert {"lora", "bottleneck", "head"} <= kinds
