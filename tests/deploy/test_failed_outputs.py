# SPDX-License-Identifier: Apache-2.0
"""Sites at which outputs of a model are NaN or infinite: they are named, and no mean over the others is shown."""

import math
from pathlib import Path

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from perada.deploy.protocol import Response
from perada.deploy.scores import failed_models_of
from perada.deploy.server.metrics import CountingTransport, RunMetrics
from perada.deploy.server.progress import RunProgress
from perada.deploy.server.rounds import log_round
from perada.deploy.transport import LocalTransport
from perada.scores.accumulation import Scores
from perada.scores.metrics import make_metrics
from perada.server.sums import SecureSums
from perada.studies.report.records import read_records
from perada.tasks import Classification
from tests.deploy.parties import Parties

BRIGHT = 4.0


class FailsOnBrightImages(nn.Module):
    """A network whose outputs are not finite for images with a bright first pixel."""

    def __init__(self, network, value=math.nan):
        super().__init__()
        self.network = network
        self.value = value

    def forward(self, x):
        is_bright = x[:, 0, 0, 0] == BRIGHT
        logits = self.network(x.clamp(-9, 9))
        return torch.where(is_bright.unsqueeze(1), self.value, logits)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
def test_no_score_is_a_mean_over_the_other_sites(algorithm, secure, tiny, tmp_path, caplog):
    loop = {"secure_sums": SecureSums()} if secure else {}
    parties = Parties(tiny, tmp_path, algorithm, net=lambda: FailsOnBrightImages(tiny.net()), loop=loop)
    parties.whole.test[1].tensors[0][:2, 0, 0, 0] = BRIGHT
    coordinator, workers = parties.deployed()
    row = coordinator.progress.history[-1]
    for name in ("personal/local_test", "personal/local_test_std", "global/global_test"):
        assert math.isnan(row[name]), name
    for model in {"global"} | ({"personal"} if algorithm == "ditto" else set()):
        assert f"the {model} model are NaN or infinite for test images of site site1" in caplog.text or secure
    # A secure sum shows that there is such a site, but not which one.
    assert ("outputs of the global model are NaN or infinite at 1 of 3 sites" in caplog.text) == secure
    assert not (secure and "test images of site" in caplog.text)
    # A report does not show an earlier score as the last one.
    (record,) = read_records(tmp_path / "server")
    assert record.undefined_scores[:1] == ["personal/local_test"]
    # Progress with NaN can be read again.
    coordinator.close()
    resumed = parties.coordinator(LocalTransport(workers), resume=True)
    assert math.isnan(resumed.progress.history[-1]["personal/local_test"])


def test_a_site_without_test_images_has_no_score_and_the_others_have(tiny, tmp_path, caplog):
    parties = Parties(tiny, tmp_path, "fedavg", net=lambda: FailsOnBrightImages(tiny.net()))
    parties.whole.test[1] = torch.utils.data.Subset(parties.whole.test[1], [])
    coordinator, _ = parties.deployed()
    assert 0 <= coordinator.progress.history[-1]["personal/local_test"] <= 1
    assert "NaN" not in caplog.text


def test_monitoring_and_loggers_have_no_earlier_score(tmp_path):
    history = [
        {"round": 0.0, "personal/local_test": 0.5, "privacy/client_epsilon_max": 1.0},
        {"round": 1.0, "personal/local_test": math.nan, "privacy/client_epsilon_max": math.nan},
    ]
    progress = RunProgress("run", "recipe", rounds=2, done=2, history=history)
    metrics = RunMetrics(progress, CountingTransport(LocalTransport({})), lambda: None)
    value_of = {}
    for metric in metrics.collect():
        for sample in metric.samples:
            value_of[sample.name, sample.labels.get("name")] = sample.value
    assert math.isnan(value_of["perada_score", "personal/local_test"])
    assert value_of["perada_run_epsilon", "privacy/client_epsilon_max"] == 1

    logger = CSVLogger(tmp_path)
    for row in history:
        log_round([logger], row)
    last_line = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[-1]
    assert "nan" in last_line.split(",")


def test_the_number_of_images_stays_at_the_site():
    """If all images fail, it is the number of the test images, which a site may keep to itself."""
    task = Classification()
    failing = Scores(make_metrics("auto", task, 2), task)
    failing.update(torch.full((1, 7, 2), math.nan), torch.zeros(7, dtype=torch.int64))
    finite = Scores(make_metrics("auto", task, 2), task)
    finite.update(torch.zeros(1, 7, 2), torch.zeros(7, dtype=torch.int64))
    assert failed_models_of({"personal": failing, "global": finite}) == {"failed_models": ["personal"]}
    assert failed_models_of({"personal": failing, "global": failing}) == {"failed_models": ["global", "personal"]}
    assert failed_models_of({"global": finite}) == {}


@pytest.mark.parametrize("value", [[], ["personal", "global"], ["other"], {"personal": 3}, "global", [["global"]]])
def test_other_failed_models_are_rejected(value):
    with pytest.raises(ValueError, match="failed_models"):
        Response("ok", "0" * 64, {"failed_models": value})
