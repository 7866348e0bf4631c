# SPDX-License-Identifier: Apache-2.0
"""What is read by other programs than ours: workflows, issue forms, the citation."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def problems(schema, *files):
    """What the schema of its kind finds wrong with some files; no text if nothing is."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_are_what_their_readers_expect(schema, pattern):
    files = sorted(ROOT.glob(pattern))
    assert files
    assert problems(schema, *files) == ""


def test_a_wrong_workflow_is_seen(tmp_path):
    file = tmp_path / "tests.yml"
    file.write_text((ROOT / ".github/workflows/tests.yml").read_text().replace("runs-on", "run-on"))
    assert "runs-on" in problems("github-workflows", file)


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
    assert {"make check", "make test", "make docs", "make dist"} == set(lines)
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


def test_a_tag_of_another_version_is_refused(tmp_path):
    """`make -n` would not run the check, so the recipe's first line is run by itself."""
    (line,) = re.findall(r"^\t@(version=.*?exit 1; \})$", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    script = line.replace("\\\n", " ").replace("$$", "$")
    for tag, code in ((f"v{PROJECT['version']}", 0), ("", 0), ("v99", 1), (PROJECT["version"], 1)):
        environment = {"PATH": "/usr/bin:/bin", "TAG": tag}
        done = subprocess.run(["sh", "-c", script], cwd=ROOT, env=environment, capture_output=True, check=False)
        assert done.returncode == code
