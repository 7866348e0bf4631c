# SPDX-License-Identifier: Apache-2.0
"""What a private run says of its privacy: in a model card, and beside an export."""

import copy
import importlib
import json
import math
import re
from dataclasses import asdict

import numpy as np
import pytest
import yaml

from perada import FederatedLoop
from perada.cli import main
from perada.privacy import ClientPrivacy, Privacy
from perada.results.cards import privacy_card, privacy_lines
from tests.recipes import recipe

SERVER = [1.25, 2.0, 4.5, 0.75]
RELEASE = [2.5, 3.0, 6.25, 1.5]
CLIENT = [0.5, 0.625, 1.0, 0.25]
TINY = recipe(
    data={"partition": {"class_path": "IID", "init_args": {"num_clients": 4}}, "train_limit": 80, "test_limit": 40},
    federated={"algorithm": "Ditto", "clients_per_round": 2},
)


def sample(**options):
    return {
        "sample": {
            "options": asdict(Privacy(**({"noise_multiplier": 1.5, "delta": 1e-4} | options))),
            "noise_multipliers": [1.5, 1.5, 0.75, 3.0],
            "sample_rates": [0.25, 0.125, 0.5, 0.2],
            "server": SERVER,
            "release": RELEASE,
        }
    }


def client_level(**options):
    arguments = ClientPrivacy(**({"noise_multiplier": 2.0, "delta": 1e-3, "max_norm": 0.5} | options))
    return {"client": {"options": asdict(arguments), "noise_multiplier": 2.0, "epsilon": CLIENT}}


def tables(text):
    """The rows of all Markdown tables, without headers and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [index for index, row in enumerate(cells) if set("".join(row)) <= {*"-:"}]
    return [row for index, row in enumerate(cells) if index not in rules and index + 1 not in rules]


@pytest.mark.parametrize("client", range(4))
def test_a_clients_card_has_its_own_epsilon_the_release_first(client):
    card = privacy_card(sample(), client)
    assert card.startswith("## Privacy\n\n")
    rows = tables(card)
    assert [row[::3] for row in rows] == [["release", f"{RELEASE[client]:.2f}"], ["server", f"{SERVER[client]:.2f}"]]
    assert rows[0][2] == "whoever gets this adapter"
    others = max(value for other, value in enumerate(SERVER) if other != client)
    assert f"other clients influenced it only through the server: their ε is at most {others:.2f}." in card
    sigma = [1.5, 1.5, 0.75, 3.0][client]
    rate = [0.25, 0.125, 0.5, 0.2][client]
    assert f"with probability {rate:g} (Poisson sampling)" in card
    assert f"1 times the noise multiplier {sigma:g}." in card
    assert "δ = 0.0001" in card


def test_a_card_of_a_run_with_one_client_has_no_empty_row():
    """A site's export does not know the ε of the others."""
    content = client_level()["client"] | {"epsilon": [0.5]}
    card = privacy_card({"client": content}, 0)
    assert tables(card) == []
    assert "it does not protect that client as a whole" in card
    assert tables(privacy_card(client_level(), 0)) == [["1.00"]]


def test_the_global_card_has_the_server_ledger_over_all_clients():
    card = privacy_card(sample(max_norm=0.5), None)
    assert tables(card) == [
        [
            "server",
            "all that clients sent, from which this adapter was computed",
            f"{np.mean(SERVER):.2f} ± {np.std(SERVER):.2f}",
            "4.50",
        ]
    ]
    assert "with probability 0.125 to 0.5 (Poisson" in card
    assert "0.5 times the noise multiplier 0.75 to 3." in card
    assert "release" not in card


def test_a_training_without_privacy_has_no_section():
    for record in (None, {}):
        assert privacy_card(record, 0) == privacy_card(record, None) == privacy_lines(record) == ""


@pytest.mark.parametrize(
    ("options", "words", "others"),
    [
        ({}, "to the norm 1 and adds", "L parameters"),
        ({"clipping": "per_layer"}, "to the norm 1 / √L for each of L parameters", "about the norm"),
        ({"clipping": "automatic"}, "scales each image's gradient to about the norm 1 and", "√L"),
        ({"sampling": "shuffle"}, "no amplification is claimed", "Poisson"),
        ({"accountant": "prv"}, "Opacus's accountant `prv`", "report too little"),
        ({"secure_rng": False}, "> **Test mode, not private: the noise is derived from the run's seed", "`prv`"),
        ({"secure_rng": True}, "Further runs on the same images", "seed"),
    ],
)
def test_the_card_says_what_was_done_and_what_is_not_covered(options, words, others):
    card = privacy_card(sample(**options), 1)
    assert words in card
    assert others not in card
    assert "are treated as public" in card


def test_without_noise_the_card_says_so():
    record = sample(noise_multiplier=0.0)
    record["sample"] |= {"noise_multipliers": [0.0] * 4, "server": [math.inf] * 4, "release": [math.inf] * 4}
    assert [row[-1] for row in tables(privacy_card(record, 2))] == ["∞", "∞"]
    assert "**No noise was added, so there is no guarantee.**" in privacy_card(record, 2)
    assert tables(privacy_card(record, None))[0][2:] == ["∞", "∞"]
    assert "no noise" not in privacy_card(sample(), 2)


def test_numbers_from_a_file_are_read_as_words():
    record = sample()
    record["sample"] |= {"server": [1.25, math.inf, 4.5, 0.75], "release": [math.inf] * 4}
    words = json.loads(json.dumps(record).replace("Infinity", '"inf"'))
    for client in (None, 0, 1):
        assert privacy_card(words, client) == privacy_card(record, client)
    assert privacy_lines(words) == privacy_lines(record)


def test_clients_as_a_whole():
    shared = privacy_card(client_level(), None)
    client_card = privacy_card(client_level(), 2)
    assert tables(shared) == [[f"{np.mean(CLIENT):.2f} ± {np.std(CLIENT):.2f}", "1.00"]]
    assert "not against the server" in shared
    assert tables(client_card) == [["0.62"]]
    assert "belongs to client 2: **it does not protect that client as a whole.**" in client_card
    for card in (shared, client_card):
        assert "clipped to the norm 0.5, and" in card
        assert "noise multiplier 2, without amplification" in card
        assert "δ = 0.001" in card
    assert "follows the quantile 0.3" in privacy_card(client_level(clipping="adaptive", quantile=0.3), None)


def test_both_kinds_stand_in_one_section():
    card = privacy_card(sample() | client_level(), 0)
    assert card.count("## Privacy") == 1
    assert card.count("Not covered:") == 1
    assert len(tables(card)) == 3
    assert "seed" not in privacy_card(sample() | client_level(), 0)
    for record in (sample(secure_rng=False) | client_level(), sample() | client_level(secure_rng=False)):
        for client in (None, 0):
            assert "Test mode, not private" in privacy_card(record, client)


def test_lines_beside_an_export():
    first, second = privacy_lines(sample() | client_level()).splitlines()
    figures = [float(number) for number in re.findall(r"\b\d+\.\d\d\b", first)]
    expected = [np.mean(RELEASE), np.std(RELEASE), max(RELEASE), np.mean(SERVER), np.std(SERVER), max(SERVER)]
    assert figures == pytest.approx(expected, abs=0.005)
    assert first.index("release ledger, personal adapters") < first.index("server ledger")
    assert "at most 1.00 (only the global adapter" in second


def test_the_program_shows_what_an_export_costs(tmp_path, monkeypatch, capsys):
    """Export shows both ledgers and writes the sections; the table of clients has columns of ε."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    record = sample() | client_level()
    real = FederatedLoop.outcome

    def private(run):
        run.info["privacy"] = copy.deepcopy(record)
        run.metrics["clients"] |= {"privacy/server_epsilon": SERVER, "privacy/release_epsilon": RELEASE}
        return run

    monkeypatch.setattr(FederatedLoop, "outcome", lambda loop, module: private(real(loop, module)))
    main(["fit", "--config", "tiny.yaml"])
    rows = tables(capsys.readouterr().out)
    ends = [row[-2:] for row in rows if row[0].isdigit()]
    assert ends == [[f"{server:.2f}", f"{release:.2f}"] for server, release in zip(SERVER, RELEASE, strict=True)]
    program = importlib.import_module("perada.cli.inference")
    opened = program.open_run
    monkeypatch.setattr(program, "open_run", lambda path, trust: private(opened(path, trust=trust)))
    main(["export", "lightning_logs/version_0", "--output", "out"])
    assert privacy_lines(record) in capsys.readouterr().out
    assert privacy_card(record, 3) in (tmp_path / "out" / "client_3" / "README.md").read_text()
    monkeypatch.setattr(program, "open_run", opened)
    main(["export", "lightning_logs/version_0", "--output", "open"])
    assert "rivacy" not in capsys.readouterr().out
    assert "Privacy" not in (tmp_path / "open" / "client_3" / "README.md").read_text()
