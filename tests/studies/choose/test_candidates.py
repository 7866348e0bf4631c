# SPDX-License-Identifier: Apache-2.0
"""The settings of the methods, and the adapters that fit a network."""

from collections import Counter

import pytest
import yaml

from perada.cli.runs import build_compared
from perada.studies.choose.candidates import ADAPTERS, RATE_FACTORS, AdapterOption, fitting_adapters, make_candidates
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


def test_a_transformer_has_lora_and_bottlenecks(configured):
    adapters = fits(configured("--federated.algorithm=FedAvg", "--model.backbone=test_vit", "--data.image_size=160"))
    kinds = {option.adapter for option in adapters}
    assert {"lora", "bottleneck", "head"} <= kinds
