# SPDX-License-Identifier: Apache-2.0
"""``ckpt_path="last"`` finds the checkpoint of the same experiment, and one of another is rejected before set-up."""

import pytest
import torch

from perada.cli import main
from perada.lightning import FederatedClassifier


def fit(tiny, folder, rounds, **options):
    arguments = tiny.options | {"distill_steps": None, "distill_batch_size": None, "algorithm": "ditto"} | options
    return tiny.finetune(tiny.data(public=False), **arguments, rounds=rounds, default_root_dir=str(folder))


def equal(one, other):
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "other", [{"algorithm": "fedavg"}, {"seed": 3}, {"lr_local": 0.3}, {"local_steps": 1}, {"batch_size": 2}], ids=str
)
@pytest.mark.every(6)
def test_last_is_the_newest_of_the_same_experiment(tiny, tmp_path, other):
    first = fit(tiny, tmp_path, 1)
    fit(tiny, tmp_path, 2, **other)
    again = fit(tiny, tmp_path, 1, ckpt_path="last")
    assert equal(first.state("personal", 2), again.state("personal", 2))
    assert len(fit(tiny, tmp_path, 2, ckpt_path="last").metrics["rounds"]) == 2


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"algorithm": "fedavg"}, r"'Ditto'.*'FedAvg'"),
        ({"seed": 3}, "its seed is 5, here 3"),
        ({"lr_local": 0.3}, "belongs to a run with training.lr_local=.*resume_allow"),
    ],
)
@pytest.mark.parametrize("by_path", [False, True], ids=["last", "path"])
def test_another_experiment_is_rejected_before_set_up(tiny, tmp_path, monkeypatch, other, message, by_path):
    fit(tiny, tmp_path, 1, seed=5)
    path = str(next(tmp_path.rglob("last.ckpt")))
    monkeypatch.setattr(FederatedClassifier, "build", lambda *_: pytest.fail("it was set up"))
    with pytest.raises(ValueError, match=message) as error:
        fit(tiny, tmp_path, 2, **{"seed": 5} | other, ckpt_path=path if by_path else "last")
    assert path in str(error.value) or by_path


@pytest.mark.slow
def test_an_allowed_option_is_no_other_experiment(tiny, tmp_path):
    fit(tiny, tmp_path, 1)
    run = fit(tiny, tmp_path, 2, lr_local=0.3, ckpt_path="last", resume_allow=["training.lr_local"])
    assert len(run.metrics["rounds"]) == 2


@pytest.mark.slow
def test_the_program_finds_the_recipes_own_run(tmp_path, monkeypatch, capsys):
    import yaml

    from ..recipes import recipe

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe(distillation={"steps": 0})))
    main(["fit", "--config", "tiny.yaml", "--federated.algorithm=ditto"])
    main(["fit", "--config", "tiny.yaml", "--federated.algorithm=fedavg"])
    main(["fit", "--config", "tiny.yaml", "--federated.algorithm=ditto", "--trainer.max_epochs=2", "--ckpt_path=last"])
    saved = yaml.safe_load((tmp_path / "lightning_logs" / "version_2" / "config.yaml").read_text())
    assert "version_0" in saved["ckpt_path"]
    main(["test", "--config", "tiny.yaml", "--federated.algorithm=fedavg", "--ckpt_path=last"])
    message = "ckpt_path=last: no checkpoint .* belongs to this run; the newest, .* its partition is 'IID"
    with pytest.raises(ValueError, match=message):
        main(
            [
                "fit",
                "--config",
                "tiny.yaml",
                "--federated.algorithm=ditto",
                "--data.partition.num_clients=4",
                "--ckpt_path=last",
            ]
        )
