# SPDX-License-Identifier: Apache-2.0
"""The ε of a site as a whole over runs with and without noise: what left without noise is counted."""

import logging
import math
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from perada.cli.deploy_check import format_privacy, format_site_privacy
from perada.cli.deploy_status import site_status
from perada.deploy.audit import read_log
from perada.deploy.protocol import Request, pack
from perada.deploy.site.file import Limits
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER
from perada.deploy.transport import LocalTransport
from perada.privacy import ClientPrivacy, Privacy
from perada.server import SecureSums

from ..parties import Parties
from ..test_rounds import Troubled
from ..test_sites import code, only_client, sending, train
from .test_deployed_sums import FOUR, asks
from .test_noisy_sums import by_opacus, noisy, spent_by_site

OTHER_RUN = "cd" * 16
WITHOUT = {
    "plain": {},
    "secure sums": {"secure_sums": SecureSums()},
    "noise of the server": {"client_privacy": ClientPrivacy(noise_multiplier=1.0, delta=1e-2, max_norm=0.1)},
    "noise of images": {"privacy": Privacy(noise_multiplier=1.0, delta=1e-2)},
}


def trained_without(tiny, tmp_path, options):
    """A site that trained one round without noise of its own; its worker has ended."""
    site = Parties(tiny, tmp_path, loop=options).worker(0)
    assert code(site.answer(message := train(site), ""), message) == "ok"
    site.store.close()
    return site.store.folder


def ask(worker, run=OTHER_RUN, round=0):
    client = only_client(worker)
    message = pack(Request("train", run, client.recipe.digest, round, clients=4), sending(client))
    return code(worker.answer(message, ""), message)


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_limit_of_the_site_is_not_kept_after_a_run_without_noise_of_its_own(kind, tiny, tmp_path, caplog):
    folder = trained_without(tiny, tmp_path, WITHOUT[kind])
    caplog.set_level(logging.WARNING, "perada.site")
    site = noisy(tiny, tmp_path, sizes=FOUR).worker(0, max_site_epsilon=8.0)
    assert site.store.folder == folder
    reason = "the site has trained, scored or counted once with recipes without client_privacy and secure_sums"
    assert reason in caplog.text  # at the start, before anything is trained
    caplog.clear()
    assert ask(site) == "exhausted"
    assert f"max_site_epsilon=8 cannot be met: {reason}" in caplog.text
    assert spent_by_site({"site0": site}) == {"site0": {0.0: 1}}
    client = only_client(site)
    assert client.site_privacy.budget.epsilon(site.store.totals.ledger.history(SITE_LEDGER)) == math.inf
    assert f"but {reason}" in format_site_privacy(client, site.store.totals.ledger)
    assert reason not in format_site_privacy(client)


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", WITHOUT)
def test_a_site_without_a_limit_goes_on_and_every_report_says_infinity(kind, tiny, tmp_path):
    folder = trained_without(tiny, tmp_path, WITHOUT[kind])
    deployment = noisy(tiny, tmp_path, sizes=FOUR)
    workers = deployment.workers()
    deployment.coordinator(LocalTransport(workers)).run()
    found = spent_by_site(workers)
    assert found == {"site0": {0.0: 1, 1.0: 2}} | {f"site{number}": {1.0: 2} for number in (1, 2, 3)}
    last = {}
    for name, worker in workers.items():
        epsilons = [entry.get("epsilon", {}) for entry in read_log(worker.store.folder).entries]
        last[name] = [found["site"] for found in epsilons if "site" in found][-1]
    epsilon = pytest.approx(by_opacus(2, delta=1e-5))
    assert last == {"site0": None, "site1": epsilon, "site2": epsilon, "site3": epsilon}  # None is ∞
    for worker in workers.values():
        worker.store.close()
    shown = site_status(SimpleNamespace(name="site0", state=folder, limits=Limits()))
    assert "The entire site, all runs together: ε ∞ (the limit is that of one complete run)" in shown
    assert "the site has trained, scored or counted once with recipes without client_privacy and secure_sums" in shown
    other = site_status(SimpleNamespace(name="site1", state=deployment.folder / "site1", limits=Limits()))
    assert f"all runs together: ε {by_opacus(2, delta=1e-5):.2f}" in other and "scored" not in other


def test_a_run_without_noise_between_two_with_noise_is_counted(tiny, tmp_path):
    site = noisy(tiny, tmp_path, sizes=FOUR).worker(0, max_site_epsilon=8.0)
    assert ask(site) == "ok"
    site.store.close()
    trained_without(tiny, tmp_path, {})
    site = noisy(tiny, tmp_path, sizes=FOUR).worker(0, max_site_epsilon=8.0)
    assert ask(site, round=1) == "exhausted"


def test_a_budget_that_was_lost_after_the_training_lets_no_vector_out(tiny, tmp_path, caplog):
    """A run with noise is trained, one without is trained, and then the first one's server asks for its vector."""
    deployment = noisy(tiny, tmp_path, rounds=1, sizes=FOUR)
    workers = {name: deployment.worker(place, max_site_epsilon=8.0) for place, name in enumerate(deployment.names)}

    def other_run_first(name, message, _):
        book = workers[name].store
        if name == "site0" and asks(message, "mask"):
            state = book.current()
            total = deepcopy(book.totals.ledger)
            total.add(SITE_LEDGER, 0.0, 1.0, 1)
            book.commit(state, replace(book.totals, ledger=total))

    (record,) = deployment.coordinator(Troubled(workers, other_run_first), min_sites=3).run().records
    assert record.summed == deployment.names[1:]
    assert spent_by_site(workers)["site0"] == {0.0: 1}
    assert "max_site_epsilon=8 cannot be met: the site has trained, scored or counted once" in caplog.text


def test_scores_that_leave_without_noise_count_and_those_that_stay_do_not(tiny, tmp_path):
    for may_send, expected in ((("counts",), 2), (("losses",), 1)):
        site = Parties(tiny, tmp_path / may_send[0], "ditto").worker(0, may_send=may_send)
        client = only_client(site)
        site.answer(train(site), "")
        shared = {f"shared/{key}": value for key, value in client.recipe.template.initial.items()}
        message = pack(Request("evaluate", "ab" * 16, client.recipe.digest, 1), shared)
        for _ in range(2):  # the second time the reply is the one before
            assert code(site.answer(message, ""), message) == "ok"
        assert site.store.totals.ledger.history(SITE_LEDGER) == {(0.0, 1.0): expected}


def test_a_limit_of_images_names_the_rounds_that_had_no_privacy(tiny, tmp_path, caplog):
    trained_without(tiny, tmp_path, {})
    private = {"loop": {"privacy": Privacy(noise_multiplier=1.0, delta=1e-2)}}
    caplog.set_level(logging.WARNING, "perada.site")
    site = Parties(tiny, tmp_path, **private).worker(0, max_epsilon=8.0)
    assert ask(site) == "exhausted"
    reason = "1 round was trained or surveyed here without privacy, so the ε of the site's images is infinite"
    assert f"max_epsilon=8 cannot be met: {reason}" in caplog.text
    client = only_client(site)
    assert site.store.totals.ledger.history(IMAGES_LEDGER) == {(0.0, 1.0): 1}
    assert f"its limit over all runs is 8; but {reason}, so every round will be rejected" in format_privacy(
        client, site.store.totals.ledger
    )
