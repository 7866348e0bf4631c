# SPDX-License-Identifier: Apache-2.0
"""What is written for a federation parses, and what cannot be run is rejected before anything starts."""

import configparser
import contextlib
import datetime
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jsonargparse import ArgumentError

from perada.cli import main
from perada.cli.flower import serve
from perada.cli.runs import USER_ERRORS
from perada.deploy.flower import keys, running
from perada.deploy.flower.app import write_app
from perada.deploy.flower.keys import write_server_keys
from perada.deploy.flower.running import Link, run_app, write_connection
from perada.deploy.monitoring import Monitoring
from perada.deploy.site.file import read_site
from perada.deploy.sums.identity import read_identity, read_sites, write_identity
from perada.deploy.transport import LocalTransport, Terms
from perada.system import files
from tests.rejections import rejects

UNITS = ("perada-site.service", "perada-supernode.service")
AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBfjCCASWgAwIBAgIUNxmDd5zs/40u6tHDZ6VOgcBYyB4wCgYIKoZIzj0EAwIw
DDEKMAgGA1UEAwwBdDAgFw0yNjExMjQyMDQyMjNaGA8yMTI2MTAzMTIwNDIyM1ow
DDEKMAgGA1UEAwwBdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABG9qza8UOhRW
WGlfuoEsT/8fnTyZQrVJln4ZDeiYix7FUmG9vXH+xRelO/N4+nHmA82dHLn+lqMn
xdp2aK6oxdGjYzBhMB0GA1UdDgQWBBSrbig6tLZC/2RfyZLJ8KnhorkdazAfBgNV
HSMEGDAWgBSrbig6tLZC/2RfyZLJ8KnhorkdazAPBgNVHRMBAf8EBTADAQH/MA4G
A1UdDwEB/wQEAwICBDAKBggqhkjOPQQDAgNHADBEAiBWi28trGDgX83Ih+rcTM/5
8oYggpiSuk8sylK+sBBLYwIgfsth/ON0ABqzUVUhR7K7wP6mQZCuS8X3V56PcZys
Up4=
-----END CERTIFICATE-----
"""


def certificate(folder):
    """The certificate of an authority, made by OpenSSL, that is valid until 2126."""
    path = folder / "ca.crt"
    path.write_text(AUTHORITY)
    return path


@pytest.fixture
def app(tmp_path):
    folder = tmp_path / "federation"
    write_app(folder, "chest-x-rays", "seed_everything: 3\n", "ab" * 32, "link.example.org")
    return folder


def test_the_app_says_what_flower_asks_for(app):
    content = tomllib.loads((app / "app" / "pyproject.toml").read_text())
    assert content["project"]["name"] == "chest-x-rays"
    assert content["tool"]["flwr"]["app"]["config"]["digest"] == "ab" * 32
    assert Terms.of(content["tool"]["flwr"]["app"]["config"]) == Terms()
    for component in content["tool"]["flwr"]["app"]["components"].values():
        module, attribute = component.split(":")
        text = (app / "app" / (module.replace(".", "/") + ".py")).read_text()
        compile(text, module, "exec")
        assert f"\n{attribute} = " in text  # Flower looks for an assignment
    assert (app / "app" / "perada_app" / "recipe.yaml").read_text() == "seed_everything: 3\n"


def test_what_a_site_has_for_itself_is_not_in_the_app(app):
    names = {file.name for file in (app / "app").rglob("*") if file.is_file()}
    assert names == {"pyproject.toml", "__init__.py", "client.py", "server.py", "recipe.yaml"}
    site = yaml.safe_load((app / "site" / "site.yaml").read_text())
    sha256 = hashlib.sha256((app / "site" / "recipe.yaml").read_bytes()).hexdigest()
    assert site["recipes"] == [{"recipe": "recipe.yaml", "sha256": sha256, "digest": "ab" * 32}]
    assert site["socket"] == "/run/perada/site.sock"


def test_the_units_agree_on_the_socket_and_its_owner(app):
    units = {}
    for file in (*app.glob("server/*"), *app.glob("site/perada*")):
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str
        parser.read_string(file.read_text().replace("\\\n", " "))
        units[file.name] = parser
    listening = units["perada-site.socket"]["Socket"]
    node = units["perada-supernode.service"]["Service"]
    assert listening["SocketMode"] == "0600"
    assert listening["SocketUser"] == node["User"] != units["perada-site.service"]["Service"]["User"]
    assert f"--socket {listening['ListenStream']}" in node["ExecStart"]
    assert "perada deploy node link.example.org:8000 " in node["ExecStart"]  # which ends when Flower gives up
    assert "--enable-supernode-auth" in units["perada-superlink.service"]["Service"]["ExecStart"]


def test_a_sites_identity_is_for_its_worker_alone(tmp_path):
    """By what is written for a recipe with secure sums, and the page's lines that install it."""
    pytest.importorskip("cryptography")
    for text, hides in (("seed_everything: 3\n", False), ("secure_sums: {min_sites: 3}\n", True)):
        folder = tmp_path / str(hides)
        write_app(folder, "sums", text, "ab" * 32, "localhost")
        file = folder / "site" / "site.yaml"
        assert ("secure_sums" in yaml.safe_load(file.read_text())) == hides
    write_identity(folder, "st-marys")
    (folder / "st-marys.id").rename(file.with_name("site.id"))
    (folder / "st-marys.id.pub").rename(file.with_name("sites.txt"))
    file.write_text(file.read_text().replace("CHANGE-ME", "st-marys"))
    hiding = read_site(file).secure_sums
    key = read_identity(hiding.identity).public_key()
    assert read_sites(hiding.sites)["st-marys"].public_bytes_raw() == key.public_bytes_raw()
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    (mode, owner), *more = re.findall(r"^install -m (\d+) -o (\S+) keys/st-marys\.id /etc/perada/site\.id$", page, re.M)
    users = {name: re.search(r"^User=(.*)$", (folder / "site" / name).read_text(), re.M)[1] for name in UNITS}
    assert not more and mode == "0400" and owner == users["perada-site.service"] != users["perada-supernode.service"]
    worker = (folder / "site" / "perada-site.service").read_text()
    assert "deploy site /etc/perada/site.yaml\n" in worker and hiding.identity.parent == file.parent


def test_a_site_gets_both_of_its_keys_or_none(tmp_path):
    pytest.importorskip("cryptography")
    (tmp_path / "st-marys.id.pub").write_text("another key")
    with pytest.raises(FileExistsError, match=r"st-marys\.id\.pub' already exists"):
        main(["deploy", "keys", "site", str(tmp_path), "--name=st-marys"])
    assert [path.name for path in tmp_path.iterdir()] == ["st-marys.id.pub"]


def test_an_identity_that_others_may_read_is_rejected(tmp_path, monkeypatch):
    """A group may read it that nobody else is in, as that of a Secret of Kubernetes, which has mode 0440."""
    pytest.importorskip("cryptography")
    write_identity(tmp_path, "st-marys")
    file = tmp_path / "st-marys.id"
    monkeypatch.setattr(os, "getgroups", lambda: [file.stat().st_gid])
    monkeypatch.setattr(files, "_other_members", lambda group: set())
    for mode in (0o600, 0o400, 0o440):
        file.chmod(mode)
        read_identity(file)
    monkeypatch.setattr(files, "_other_members", lambda group: {10002})
    for mode in (0o440, 0o404, 0o620):
        file.chmod(mode)
        with pytest.raises(ValueError, match=rf"\.id'.*{mode:04o}.*chmod 0400"):
            read_identity(file)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.slow
def test_systemd_accepts_the_units(app, tmp_path):
    units = []
    for file in (*app.glob("server/*"), *app.glob("site/perada*")):
        text = file.read_text()
        for program in ("flower-superlink", "perada"):
            text = text.replace(f"=/opt/perada/bin/{program} ", "=/bin/true ")
        for user in ("perada-node", "perada-site", "perada"):
            text = text.replace(f"User={user}\n", "User=root\n")
        units.append(tmp_path / file.name)
        units[-1].write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_units_leave_little_to_whoever_takes_over_a_process(app):
    """Exposure from 0 to 10, as systemd rates it: below 4 is "OK"."""
    for file in (*app.glob("server/*.service"), *app.glob("site/*.service")):
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", file]
        rated = subprocess.run(command, capture_output=True, text=True, check=False)
        assert rated.returncode == 0, rated.stdout.splitlines()[-1]


@pytest.mark.slow
def test_init_names_the_digest_of_recipe_and_weights(tmp_path, capsys):
    said = []
    for name, words in (("one", []), ("two", []), ("other", ["--name", "other"])):
        recipe = "digits"
        if name == "other":
            recipe = str(tmp_path / "recipe.yaml")
            main(["cp", "digits", recipe])
            text = (tmp_path / "recipe.yaml").read_text()
            (tmp_path / "recipe.yaml").write_text(text.replace("prox_strength: 5.0", "prox_strength: 2.0"))
        main(["deploy", "init", recipe, str(tmp_path / name), *words])
        said.append(capsys.readouterr().out.split()[-1])
    config = tomllib.loads((tmp_path / "one" / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert said[0] == said[1] == config["digest"] != said[2]


def test_nothing_is_written_over(app):
    before = {file: file.read_bytes() for file in app.rglob("*") if file.is_file()}
    with pytest.raises(FileExistsError, match="already exists"):
        write_app(app, "other", "", "", "localhost")
    assert {file: file.read_bytes() for file in app.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["", "Chest", "9", "a/b", "a_b", "a" * 42])
def test_names_that_no_app_can_have(tmp_path, name):
    with pytest.raises(ValueError, match="app name"):
        write_app(tmp_path / "app", name, "", "", "localhost")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_sites": 0}, r"min_sites .*got 0"),
        ({"sample": -1}, r"sample .*got -1"),
        ({"min_sites": 4, "sample": 3}, r"sample .*got 3"),
        ({"deadline": 0.0}, r"deadline .*got 0.0"),
        ({"late": "never"}, r"late .*got 'never'"),
        (
            {"state": "state"},
            "state must be an absolute path on the SuperLink's machine",
        ),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Terms(**options)


def test_options_come_back_from_flower_as_they_went():
    options = Terms(3, 5, 1.5, "skip", True, "/srv/state")
    assert Terms.of(vars(options) | {"digest": "ab"}) == options


def test_links_that_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="link='there' is not defined"):
        Link("there")
    authority = certificate(tmp_path)
    write_connection(tmp_path, "there", "link.example.org:8000", authority)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]["there"] == {
        "address": "link.example.org:8000",
        "root-certificates": str(authority),
    }
    Link("there")
    Link("link.example.org:8000", authority)
    for where, given, message in [
        ("here", None, "which has there; use"),
        ("there", authority, "is a name, and Flower's configuration sets its certificate"),
        ("link.example.org:8000", None, "is an address; pass its certificate"),
        ("link.example.org:0", authority, "needs a port from 1 to 65535"),
        ("https://link.example.org:8000", authority, "neither a host name nor an address"),
    ]:
        with pytest.raises(ValueError, match=message):
            Link(where, given)
    with pytest.raises(ValueError, match=r"none\.crt' is not an authority's certificate"):
        Link("link.example.org:8000", tmp_path / "none.crt")


def test_the_command_rejects_what_is_no_app(tmp_path, app):
    authority = certificate(tmp_path)
    words = ["--link", "localhost:8000", "--root-certificates", str(authority)]
    with pytest.raises(FileNotFoundError, match="`app`"):
        main(["deploy", "run", str(app), *words])
    with rejects("min_sites", 0):
        main(["deploy", "run", str(app / "app"), *words, "--min-sites", "0"])


def test_the_connection_to_an_address_is_flowers_own_while_it_is_used(tmp_path):
    authority = certificate(tmp_path)
    with Link("localhost:8000", authority).connection() as (name, environment):
        content = tomllib.loads(Path(environment["FLWR_HOME"], "config.toml").read_text())["superlink"]
        assert content == {
            "default": name,
            name: {"address": "localhost:8000", "root-certificates": str(authority)},
        }
        assert environment["FLWR_TELEMETRY_ENABLED"] == "0"


def test_the_commands_of_the_page_are_read_by_the_program(tmp_path, monkeypatch):
    """Each with the parser that it has; what it would do then is left out, but for identities."""
    monkeypatch.chdir(tmp_path)
    main(["cp", "sites", "federation.yaml"])
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "deploy.md").read_text() + (docs / "deploy_reference.md").read_text()
    as_user = r"(?:sudo -u [\w-]+ )?(?:/opt/perada/bin/)?"
    # The test of a connection would need a server.
    lines = re.findall(rf"^{as_user}perada (deploy (?!node ).*)$", page.replace("\\\n", " "), re.MULTILINE)
    assert len(lines) >= 12
    seen = []
    for name in ("write_app", "write_server_keys", "write_site_keys", "Link", "run_app", "recipe_digest"):
        monkeypatch.setattr(f"perada.cli.flower.{name}", lambda *arguments, name=name: seen.append(name))
    monkeypatch.setattr("perada.studies.deployment.run_demo", lambda rounds, _, secure_sums: seen.append(rounds))
    for name in ("site.yaml", "STATE"):
        (tmp_path / name).touch()
    monkeypatch.setattr("perada.cli.audit.read_site", lambda path: sys.exit(seen.append(str(path))))
    monkeypatch.setattr("perada.cli.deploy._run_of_site", lambda *arguments: sys.exit(seen.append("site's export")))
    monkeypatch.setattr("perada.cli.deploy.read_site", lambda path: SimpleNamespace(state=path, recipes=[]))
    monkeypatch.setattr("perada.cli.deploy._read_ledger", lambda state: seen.append("check"))
    monkeypatch.setattr("perada.cli.deploy_status.read_site", lambda path: sys.exit(seen.append("status")))
    for line in lines:
        with contextlib.suppress(SystemExit):
            main(shlex.split(line))
    assert set(seen) == {
        "write_app",
        "write_server_keys",
        "write_site_keys",
        "Link",
        "run_app",
        "recipe_digest",
        3,
        "site.yaml",
        "site's export",
        "check",
        "status",
    }


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        (
            "echo Successfully started run 42; echo round 0",
            "finished:completed",
            "Flower's run 42 has the status finished:completed",
        ),
        (
            "echo Successfully started run 42; exit 1",
            "finished:failed",
            "Flower's run 42 has the status finished:failed",
        ),
        ("echo no such SuperLink; exit 1", "", "no such SuperLink"),
        (
            "echo Successfully started run 42; sleep 0.3; kill -INT $PPID; exec sleep 20",
            "",
            "stop it with: perada deploy runs --link localhost:",
        ),
        ("sleep 0.3; kill -INT $PPID; exec sleep 20", "", "Stopped before the run had a number"),
    ],
)
def test_a_run_is_followed_to_its_end(tmp_path, app, monkeypatch, capfd, does, code, said):
    """By a program in the place of Flower's, which says what that says."""
    flower = tmp_path / "flwr"
    flower.write_text(
        f"""#!/bin/sh\nif [ $1 = list ]; then echo '{{"runs": [{{"status": "{code}"}}]}}'; else {does}; fi\n"""
    )
    flower.chmod(0o755)
    monkeypatch.setattr("perada.deploy.flower.running.program", lambda name: flower)
    ended = run_app(app / "app", Link("localhost:8000", certificate(tmp_path)), Terms())
    assert ended == (0 if code == "finished:completed" else 130 if "kill" in does else 1)
    assert said in "".join(capfd.readouterr())


def test_a_certificate_that_expires_soon_is_said_and_one_that_has_is_rejected(tmp_path, monkeypatch):
    file = certificate(tmp_path)
    expires = datetime.datetime(2126, 10, 31, 20, 42, 23, tzinfo=datetime.UTC).timestamp()

    def days_before(days):
        now = SimpleNamespace(time=lambda: expires - days * 86400, strftime=time.strftime, gmtime=time.gmtime)
        monkeypatch.setattr(running, "time", now)

    days_before(61)
    Link("localhost:8000", file)
    days_before(59)
    with pytest.warns(UserWarning, match=r"ca\.crt'.*2126-10-31"):
        Link("localhost:8000", file)
    days_before(-1)
    with pytest.raises(ValueError, match=r"ca\.crt'.*2126-10-31"):
        Link("localhost:8000", file)
    file.write_text("no certificate")
    with pytest.raises(ValueError, match=r"not an authority's certificate.*ca\.crt"):
        Link("localhost:8000", file)


@pytest.mark.filterwarnings("error")
def test_certificates_that_are_written_are_read(tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    write_server_keys(tmp_path, ["localhost"])
    Link("localhost:8000", tmp_path / "ca.crt")
    with pytest.raises(ValueError, match=r"not an authority's certificate.*ca\.crt"):
        Link("localhost:8000", tmp_path / "server.pem")
    monkeypatch.setattr(keys, "AUTHORITY_DAYS", 30)
    last = write_server_keys(tmp_path / "soon", ["localhost"], days=30)
    with pytest.warns(UserWarning, match=rf"ca\.crt'.*{last}"):
        Link("localhost:8000", tmp_path / "soon" / "ca.crt")


def test_why_a_run_failed_is_said(tmp_path, app, monkeypatch, capfd):
    """As Flower's list says it; where it does not, as when the SuperLink was suspended, what this means."""
    for details, said in (("ServerApp failed with exception: no room", "no room"), ("", "was suspended or overloaded")):
        flower = tmp_path / "flwr"
        runs = json.dumps({"runs": [{"status": "finished:failed", "status-details": details}]})
        flower.write_text(
            f"#!/bin/sh\nif [ $1 = list ]; then echo '{runs}'; else echo Successfully started run 7; fi\n"
        )
        flower.chmod(0o755)
        monkeypatch.setattr("perada.deploy.flower.running.program", lambda name, flower=flower: flower)
        folder = tmp_path / said
        folder.mkdir()
        assert run_app(app / "app", Link("localhost:8000", certificate(folder)), Terms()) == 1
        shown = "".join(capfd.readouterr())
        assert said in shown and "with --resume" in shown


@pytest.mark.parametrize("kind", USER_ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_at_the_server_is_one_line_for_whoever_started_the_run(kind, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise kind(*[None] * (kind is ArgumentError), "no such\n  adapter")

    for name in ("perada.deploy", "pytorch_lightning.utilities.rank_zero"):
        log = logging.getLogger(name)
        monkeypatch.setattr(log, "handlers", log.handlers[:])
        monkeypatch.setattr(log, "level", log.level)
        monkeypatch.setattr(log, "propagate", log.propagate)
    monkeypatch.setattr("perada.cli.flower.quiet_libraries", lambda: None)
    monkeypatch.setattr("perada.cli.deploy.run_rounds", fail)
    with pytest.raises(RuntimeError, match=r"^no such adapter$"):
        serve(tmp_path / "recipe.yaml", LocalTransport({}), Terms(), tmp_path, Monitoring())
    assert capsys.readouterr().out == "perada: error: no such adapter\n"


def test_lines_are_printed_once_although_a_library_configures_the_root_logger(tmp_path, monkeypatch, capfd):
    """As Opacus does at the first private round."""
    for name in ("perada.deploy", "pytorch_lightning.utilities.rank_zero"):
        log = logging.getLogger(name)
        monkeypatch.setattr(log, "handlers", log.handlers[:])
        monkeypatch.setattr(log, "level", log.level)
        monkeypatch.setattr(log, "propagate", log.propagate)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr("perada.cli.flower.quiet_libraries", lambda: None)

    def run_rounds(*_):
        logging.getLogger("perada.deploy").warning("round 1: all broke")
        logging.basicConfig(stream=sys.stderr)
        logging.getLogger("perada.deploy").warning("round 2: all broke")

    monkeypatch.setattr("perada.cli.deploy.run_rounds", run_rounds)
    serve(tmp_path / "recipe.yaml", LocalTransport({}), Terms(), tmp_path, Monitoring())
    assert "".join(capfd.readouterr()).splitlines() == ["round 1: all broke", "round 2: all broke"]


def test_runs_are_listed_and_stopped_by_the_command_that_is_printed(tmp_path, monkeypatch, capfd):
    """Flower's own commands know no address, and no connection that only `perada deploy run` used."""
    flower = tmp_path / "flwr"
    flower.write_text('#!/bin/sh\necho "$@"; cat $FLWR_HOME/config.toml\n')
    flower.chmod(0o755)
    monkeypatch.setattr("perada.deploy.flower.running.program", lambda name: flower)
    link = Link("localhost:8000", certificate(tmp_path))
    for run, words in (("", "list perada"), ("42", "stop 42 perada")):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(link.command(run))[1:])
        assert ended.value.code == 0
        printed = capfd.readouterr().out
        assert printed.splitlines()[0] == words
        assert tomllib.loads(printed.partition("\n")[2])["superlink"]["perada"]["address"] == "localhost:8000"
    with pytest.raises(ValueError, match="--stop='first'"):
        main([*shlex.split(link.command())[1:], "--stop", "first"])


def test_batch_norm_in_private_training_is_rejected_before_sites_get_the_recipe(tmp_path):
    main(["cp", "digits", str(tmp_path / "recipe.yaml")])
    with (tmp_path / "recipe.yaml").open("a") as file:
        file.write("privacy: {noise_multiplier: 1.0}\n")
    with pytest.raises(ValueError, match="BatchNorm"):
        main(["deploy", "init", str(tmp_path / "recipe.yaml"), str(tmp_path / "federation")])
    assert not (tmp_path / "federation").exists()
