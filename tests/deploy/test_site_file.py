# SPDX-License-Identifier: Apache-2.0
"""What `site.yaml` says, and the commands that read it."""

import hashlib
import re
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from perada.cli.main import main
from perada.deploy.site.file import Limits, read_site
from perada.deploy.state import read_state

RECIPE = {
    "trainer": {"max_epochs": 1, "accelerator": "cpu"},
    "model": {"backbone": "test_resnet", "pretrained": False, "adapter": "head"},
    "data": {
        "dataset": "Digits",
        "partition": {"class_path": "IID", "init_args": {"num_clients": 2}},
        "image_size": 32,
        "batch_size": 8,
        "train_limit": 40,
        "test_limit": 20,
    },
    "federated": {"algorithm": "Ditto"},
    "training": {"engine": "loop", "local_steps": 1},
}
PART = {key: RECIPE["data"][key] for key in ("dataset", "partition", "train_limit", "test_limit")}


def write(folder, name, digest="", /, **entries):
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump(RECIPE).encode()
    (folder / "recipe.yaml").write_bytes(text)
    approved = {"sha256": hashlib.sha256(text).hexdigest(), "digest": digest} if digest else {}
    content = {"name": name, "recipes": [{"recipe": "recipe.yaml"} | approved], "data": PART | {"client": 0}}
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(content | entries))
    return path


def test_a_sites_file_is_read_with_paths_from_its_folder(tmp_path):
    data = {"root": "images", "layout": "{class}/*"}
    limits = {"max_epsilon": 8, "max_rounds": 3, "delta": 1e-6}
    path = write(tmp_path, "st-marys", data=data, limits=limits, may_send=["sizes"], socket="run.sock")
    site_options = read_site(path)
    assert site_options.data == {"root": str(tmp_path / "images"), "layout": "{class}/*"}
    assert (site_options.state, site_options.socket) == (tmp_path / "state", tmp_path / "run.sock")
    assert (site_options.limits, site_options.may_send) == (Limits(8, 1e-6, "rdp", 3), ("sizes",))
    assert site_options.recipes == {tmp_path / "recipe.yaml": ("", "")}


def test_numbers_are_read_as_people_write_them(tmp_path):
    """YAML takes 1e-5 for a text."""
    path = write(tmp_path, "a")
    path.write_text(path.read_text() + "limits: {delta: 1e-5, max_epsilon: 8}\n")
    assert read_site(path).limits == Limits(8, 1e-5)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"name": "../x"}, r"name .*got '../x'"),
        ({"more": 1}, r"entry .*got 'more'"),
        ({"may_send": ["images"]}, r"may_send .*got 'images'"),
        ({"may_send": "sizes"}, r"may_send .*got 'sizes'"),
        ({"limits": {"max_epsilon": -1}}, r"max_epsilon .*got -1"),
        ({"name": "CHANGE-ME"}, "name is still CHANGE-ME; set it to the name that the server registered"),
        ({"limits": {"delta": 1}}, r"delta .*got 1"),
        ({"limits": {"delta": "little"}}, r"delta .*got 'little'"),
        ({"recipes": [{"recipe": "recipe.yaml", "digest": "ab" * 32}]}, "has a digest but no sha256"),
        ({"limits": {"accountant": "gdp"}}, r"accountant .*got 'gdp'"),
        ({"limits": {"epsilon": 1}}, r"limits .*got 'epsilon'"),
        ({"data": None}, r"data .*got None"),
        ({"recipes": []}, "recipes must be a list of entries .*, got "),
        ({"recipes": [{"recipe": "recipe.yaml", "digest": "12"}]}, r"digest .*got '12'"),
        ({"recipes": [{"recipe": "none.yaml"}]}, "none.yaml' does not exist"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(entries, message, tmp_path):
    path = write(tmp_path, "a", **entries)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_site(path)


def test_reading_it_needs_no_torch(tmp_path):
    path = write(tmp_path, "a")
    program = (
        "import sys; from pathlib import Path; from perada.deploy.site.file import read_site; "
        "import perada.deploy.protocol, perada.deploy.transport; "
        f"from perada.deploy.protocol import read_header, pack; read_site(Path({str(path)!r})); "
        "read_header(pack({})); "
        "sys.exit('torch' in sys.modules or 'flwr' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("command", ["site", "check"])
def test_a_folder_in_place_of_the_file_is_rejected(tmp_path, command):
    with pytest.raises(IsADirectoryError, match=r"folder.*/site\.yaml"):
        main(["deploy", command, str(tmp_path)])


@pytest.mark.slow
def test_a_federation_on_this_machine_by_its_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [write(tmp_path / name, name, data=PART | {"client": n}) for n, name in enumerate("ab")]
    main(["deploy", "check", str(paths[0])])
    output = capsys.readouterr().out
    (digest,) = re.findall("digest: ([0-9a-f]{64})\n", output)
    assert "not approved" in output and "20 training images, 10 test images" in output
    run = ["deploy", "run", "a/recipe.yaml", "--local", *map(str, paths), "--folder", "srv", "--min-sites", "2"]
    with pytest.raises(ValueError, match="not approved"):
        main(run)
    for n, path in enumerate(paths):
        write(path.parent, path.parent.name, digest, data=PART | {"client": n}, may_send=["sizes", "counts"])
    main(run)
    main(["deploy", "status", "srv"])
    output = capsys.readouterr().out
    assert "1 of 1 rounds" in output and "2 of 2" in output
    main(["deploy", "status", str(paths[1])])
    (row,) = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if digest[:8] in line]
    assert [cell.strip() for cell in row[1:]] == ["local", digest[:8], "1", "1"]  # rounds are counted from 1
    main(["deploy", "export", str(paths[1]), "--output", "out"])
    main(["deploy", "export", "srv", "--recipe", "a/recipe.yaml", "--output", "server"])
    for folder in ("out/client_0", "out/global", "server/global"):
        assert (tmp_path / folder / "adapter_model.safetensors").is_file()
    exported = load_file(tmp_path / "out" / "client_0" / "adapter_model.safetensors").values()
    (kept,) = read_state(tmp_path / "b" / "state" / "state.safetensors")[0].training.client_state.values()
    assert len(exported) == len(kept) == 2
    assert all(any(torch.equal(value, own[0]) for own in kept.values()) for value in exported)
    main(["report", "srv"])
    assert "own images" in capsys.readouterr().out


def test_nothing_of_a_recipe_that_is_not_the_approved_one_is_imported(tmp_path, monkeypatch):
    """Names of classes are imported when a recipe is read: its text is compared before."""
    path = write(tmp_path, "a", "ab" * 32, socket="run.sock")
    (tmp_path / "stranger.py").write_text("from perada.algorithms.perada import Ditto\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = RECIPE | {"federated": {"algorithm": {"class_path": "stranger.Ditto"}}, "training": {"local_steps": 1}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    runs = ["deploy", "run", str(tmp_path / "recipe.yaml"), "--local", str(path)]
    for words in (["deploy", "site", str(path)], ["deploy", "check", str(path)], runs):
        with pytest.raises(ValueError, match=r"SHA-256 \w+,"):
            main(words)
        assert "stranger" not in sys.modules
