# SPDX-License-Identifier: Apache-2.0
"""What persons at the server and at a site are shown of secure sums."""

import re
from pathlib import Path

import pytest
import yaml

from perada.cli import main
from perada.cli.deploy_check import format_sent, format_sums
from perada.deploy.protocol import read_header
from perada.deploy.sums.party import Party
from perada.deploy.transport import Failure, LocalTransport

from ..parties import Parties
from ..test_rounds import Troubled
from .test_deployed_sums import FOUR, Liar, asks, parties


def cells(said):
    """The cells of each line of a table, by its first."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_a_site_is_told_what_leaves_it_and_among_whom_it_hides(tiny, tmp_path):
    deployment = parties(tiny, tmp_path, rounds=1)
    workers = deployment.workers()
    transport = Liar(workers)
    deployment.coordinator(transport).run()
    masked = next(reply for name, kind, reply in transport.seen if kind == "mask")
    size = len(masked) - 8 - int.from_bytes(masked[:8], "little")
    (client,) = workers["site0"].clients.values()
    left = f"{size // 8:,} numbers ({size / 1e6:.3f} MB) per round and"
    assert format_sent(client, ("sizes", "counts")) == f"{left} counts, all masked, plus sizes"
    assert format_sent(client, ()) == f"{left} no scores, all masked, plus nothing else"
    assert format_sums(client, workers["site0"].sums.party) == "yes: hidden among at least 2 of 2 others: site1, site2"
    alone = Party("site0", deployment.identities[0], {"site1": deployment.identities[1].public_key()})
    assert format_sums(client, alone).endswith("2 of 1 others: site1; too few, so no sum will be computed")


@pytest.mark.slow
def test_status_shows_who_was_in_which_sum_and_why_in_none(tiny, tmp_path, capsys):
    deployment = parties(tiny, tmp_path, "fedavg", rounds=3, sizes=FOUR)

    def gone(name, message, _):
        there = {0: deployment.names, 1: deployment.names[1:], 2: deployment.names[2:]}[
            min(2, read_header(message)["round"])
        ]
        return Failure("malformed") if name not in there and asks(message, "mask") else None

    deployment.coordinator(Troubled(deployment.workers(), gone), min_sites=3).run()
    capsys.readouterr()
    main(["deploy", "status", str(tmp_path / "server")])
    shown = cells(capsys.readouterr().out)
    place = shown["round"].index("in the sum")
    assert [shown[number][place] for number in "123"] == [", ".join(deployment.names), "site1, site2, site3", "–"]
    void = [shown[number][shown["round"].index("no update because")] for number in "123"]
    assert void == ["–", "–", "secure sum: 2 of 4 sites sent their part, but 3 are required"]

    (tmp_path / "recipe.yaml").write_text("")
    site = {"name": "site0", "data": {"root": "."}, "state": "site0", "recipes": [{"recipe": "recipe.yaml"}]}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    main(["deploy", "status", str(tmp_path / "site.yaml")])
    # A table of the site's own scores stands beside that of its runs.
    (table_of_runs,) = [block for block in capsys.readouterr().out.split("\n\n") if "last under masks" in block]
    shown = cells(table_of_runs)
    (row,) = [row for name, row in shown.items() if name not in ("run",) and not name.startswith("-")]
    assert row[shown["run"].index("last round")] == "3" and row[shown["run"].index("last under masks")] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("sums", [True, False])
def test_status_shows_a_site_that_is_away(sums, tiny, tmp_path, capsys):
    """It joined and is not connected in the second round, in which nobody asks it anything."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=3, sizes=FOUR, every=3) if sums else None
    deployment = deployment or Parties(tiny, tmp_path, "fedavg", rounds=3, sizes=FOUR, every=3)
    workers = deployment.workers()
    transport = LocalTransport(dict(workers))
    coordinator = deployment.coordinator(transport, min_sites=3)
    coordinator._run_round()
    del transport.workers["site2"]
    coordinator._run_round()
    transport.workers["site2"] = workers["site2"]
    coordinator._run_round()
    main(["deploy", "status", str(tmp_path / "server")])
    shown = cells(capsys.readouterr().out)
    place = shown["round"].index("missing")
    assert [shown[number][place] for number in "123"] == ["–", "site2 (away)", "–"]


class Weighed(LocalTransport):
    """Notes kilobytes of messages by step and direction; of the first site, in the first round."""

    def __init__(self, workers):
        super().__init__(workers)
        self.sizes = {}

    def exchange(self, messages, enough, deadline):
        result = super().exchange(messages, enough, deadline)
        header = read_header(messages["site0"])
        if header["round"] == 0:
            self.sizes |= {
                (header["kind"], "down"): len(messages["site0"]),
                (header["kind"], "up"): len(result["site0"]),
            }
        return result


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "column"), [(3, 1), (10, 2)])
def test_messages_have_the_sizes_that_the_page_says(sites, column, tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "fedavg", sizes=(6,) * sites, rounds=1)
    transport = Weighed(deployment.workers())
    deployment.coordinator(transport, min_sites=sites).run()
    page = (Path(__file__).parents[3] / "docs" / "secure_sums.md").read_text(encoding="utf-8")
    table = {
        name: cells for name, *cells in re.findall(r"^\| ([^|]+) \| (\S+) \| (\S+) \| \S+ \|$", page, re.MULTILINE)
    }
    for name, step in {
        "list of all, down": ("shares", "down"),
        "sealed shares, up": ("shares", "up"),
        "shares, down": ("hold", "down"),
        "shares that do not open, up": ("hold", "up"),
        "sites that mask, down": ("mask", "down"),
        "sites in the sum, down": ("confirm", "down"),
        "signature, up": ("confirm", "up"),
        "signatures, down": ("reveal", "down"),
        "shares, up": ("reveal", "up"),
    }.items():
        assert transport.sizes[step] / 1000 == pytest.approx(float(table[name][column - 1]), abs=0.05, rel=0.1), name
