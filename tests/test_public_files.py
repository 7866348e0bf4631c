# SPDX-License-Identifier: Apache-2.0
"""What is read by other programs than ours: workflows, issue forms, the citation, the compose file."""

import re
import subprocess
import tomllib
from pathlib import Path

import check_jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def problems(capsys, schema, *files):
    """What the schema of its kind finds wrong with some files; no text if nothing is."""
    words = ["--builtin-schema", f"vendor.{schema}", *map(str, files)]
    code = check_jsonschema.main(words, standalone_mode=False)
    captured = capsys.readouterr()
    return captured.out + captured.err if code else ""


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("citation-file-format", "CITATION.cff"),
        ("compose-spec", "container/compose.yaml"),
    ],
)
def test_files_are_what_their_readers_expect(schema, pattern, capsys):
    files = sorted(ROOT.glob(pattern))
    assert files
    assert problems(capsys, schema, *files) == ""


def test_a_wrong_workflow_is_seen(tmp_path, capsys):
    file = tmp_path / "tests.yml"
    file.write_text((ROOT / ".github/workflows/tests.yml").read_text().replace("runs-on", "run-on"))
    assert "runs-on" in problems(capsys, "github-workflows", file)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_do_no_more_than_they_need(path):
    """Only what publishes has an identity, only Pages are written, and no text of strangers gets into a script."""
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        allowed = {"id-token", "pages"} if name == "publish" and path.stem == "docs" else {"id-token"}
        assert set(job.get("permissions", {})) <= (allowed if name == "publish" else set())
        for step in job.get("steps", []):
            assert "${{" not in step.get("run", "")
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
    assert "pull_request_target" not in path.read_text()
    assert "secrets." not in path.read_text()


def test_workflows_run_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [s["run"] for path in WORKFLOWS for job in jobs(path).values() for s in job.get("steps", []) if "run" in s]
    assert {"make check", "make test", "make test-all", "make slurm", "make docs", "make dist"} == set(lines)
    assert {line.removeprefix("make ") for line in lines} <= targets


def test_every_python_that_is_promised_is_tested():
    (workflow,) = (path for path in WORKFLOWS if path.stem == "tests")
    tested = jobs(workflow)["tests"]["strategy"]["matrix"]["python"]
    assert tested == re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_what_is_published_was_tested_and_is_what_the_tag_says():
    (workflow,) = (path for path in WORKFLOWS if path.stem == "publish")
    of = jobs(workflow)
    assert of["publish"]["needs"] == "build"
    assert of["build"]["needs"] == "tests"
    assert of["tests"]["uses"] == "./.github/workflows/tests.yml"
    (step,) = (step for step in of["build"]["steps"] if step.get("run") == "make dist")
    assert step["env"] == {"TAG": "${{ github.ref_name }}"}


def test_a_tag_of_another_version_is_rejected(tmp_path):
    """`make -n` would not run the check, so the recipe's first line is run by itself."""
    (line,) = re.findall(r"^\t@(version=.*?exit 1; \})$", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    script = line.replace("\\\n", " ").replace("$$", "$")
    for tag, code in ((f"v{PROJECT['version']}", 0), ("", 0), ("v99", 1), (PROJECT["version"], 1)):
        environment = {"PATH": "/usr/bin:/bin", "TAG": tag}
        done = subprocess.run(["sh", "-c", script], cwd=ROOT, env=environment, capture_output=True, check=False)
        assert done.returncode == code


def services():
    return yaml.safe_load((ROOT / "container" / "compose.yaml").read_text())["services"]


def mounted(service):
    """Places in a container, with where each is from and whether it can be written to."""
    parts = [re.fullmatch(r"(\$\{.*\}|[\w-]+):(/[\w/-]+)(:ro)?", volume) for volume in service["volumes"]]
    return {part[2]: (part[1], part[3] is None) for part in parts}


def test_containers_have_no_more_rights_than_they_need():
    for service in services().values():
        assert service["user"].split(":")[0] not in ("0", "root")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service and "pid" not in service and "cap_add" not in service


def test_containers_are_limited_and_reached_from_where_the_operator_says():
    """An engine publishes a port without an address on all interfaces, past the firewall."""
    for service in services().values():
        assert service["mem_limit"] and service["pids_limit"] <= 4096
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}
        assert all("size=" in place for place in service["tmpfs"])
        for port in service.get("ports", ()):
            assert re.fullmatch(r"\$\{PERADA_\w*BIND:-127\.0\.0\.1\}:(\d+):\1", port)


def test_the_image_has_what_a_recipe_and_the_metrics_port_need():
    lock = (ROOT / "Makefile").read_text()
    command = next(line for line in lock.splitlines() if "requirements-flower.txt" in line and "compile" in line)
    assert {"flower", "privacy", "monitoring", "examples"} <= set(re.findall(r"--extra (\w+)", command))


def test_who_sees_the_images_has_no_network_and_who_has_one_does_not_see_them():
    of = services()
    private = {"/srv/images", "/var/lib/perada-site"}
    for name, service in of.items():
        assert (service.get("network_mode") == "none") == bool(private & set(mounted(service))) == (name == "worker")
    worker = mounted(of["worker"])
    node = mounted(of["supernode"])
    shared = {source for source, _ in worker.values()} & {source for source, _ in node.values()}
    assert shared == {worker["/run/perada"][0]}
    assert [place for place, (_, written) in worker.items() if written] == ["/var/lib/perada-site", "/run/perada"]
    assert [place for place, (_, written) in node.items() if written] == ["/var/lib/perada"]


def test_containers_find_what_deploy_init_writes():
    """The paths of `site.yaml` and the unit files hold in the containers, too."""
    files = ROOT / "perada" / "deploy" / "flower" / "files"
    site = (files / "site" / "site.yaml.tmpl").read_text()
    for entry in ("root", "state"):
        assert re.search(rf"^ *{entry}: (\S+)", site, re.MULTILINE)[1] in mounted(services()["worker"])
    socket = re.search(r"^socket: (\S+)", site, re.MULTILINE)[1]
    assert str(Path(socket).parent) in mounted(services()["supernode"])
    assert f"--socket={socket}" in services()["supernode"]["command"]
    assert socket in services()["worker"]["healthcheck"]["test"]
    image = (ROOT / "container" / "Containerfile").read_text()
    for unit in ("server/perada-superlink", "site/perada-supernode", "site/perada-site"):
        for name in re.findall(r"(?:FLWR|HF)_\w+=\w", (files / f"{unit}.service.tmpl").read_text()):
            assert name in image
    commands = " ".join(word for service in services().values() for word in service["command"])
    for name in re.findall(r"/etc/perada/[\w.]+", "".join(p.read_text() for p in files.rglob("*.service.tmpl"))):
        assert name in commands
