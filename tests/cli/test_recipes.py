# SPDX-License-Identifier: Apache-2.0
"""Every recipe and every combination of data set, method and privacy runs, on small data and small backbones."""

import json
import math
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import timm
import yaml
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from timm.models import vision_transformer

import perada
from perada.cli import main
from perada.cli.messages import one_line
from perada.cli.parser import spelt_out
from perada.cli.recipes import find_recipe, is_comparison, shipped_recipes
from perada.cli.recipes import recipe_text as merged
from perada.cli.runs import PeradaCLI
from tests.comparisons import plan_of

from ..algorithms.problems import ADAPTER_OF
from ..data.miniatures import DOMAINS, HOSPITALS, write_chexpert, write_hospitals, write_office_home

ROOT = Path(perada.__file__).parent / "recipes"
FILES = sorted(ROOT.rglob("*.yaml"))
FOLDERS = ("data", "method", "privacy", "paper")
GROUPS = {group: [path.stem for path in FILES if path.parent.name == group] for group in FOLDERS}
IMAGES = [name for name in GROUPS["data"] if name != "shakespeare"]  # texts: tests/data/test_shakespeare.py
COMPARISONS = [path.stem for path in FILES if path.parent == ROOT and is_comparison(path)]
OF_SITES = ["sites", "sites_dicom"]
"""Recipes that read users' own files, which tests/deploy/test_sites_recipe.py runs."""
COMPLETE = [path.stem for path in FILES if path.parent == ROOT and path.stem not in (*OF_SITES, *COMPARISONS)]
COMBINATIONS = ["/".join(parts) for parts in product(IMAGES, GROUPS["method"])]
COMBINATIONS += ["/".join(parts) for parts in product(IMAGES, GROUPS["method"], GROUPS["privacy"])]
BACKBONES_OF_STARTS = {"perada_figure5": "resnet18", "perada_figure5_mini": "test_resnet"}
"""Comparisons that start from a file of weights, and the network that these are of."""
SPELT_OUT = {
    combined.format(method): said["all"] | own
    for combined, said in yaml.safe_load(Path(__file__).with_name("combined_recipes.yaml").read_text()).items()
    for method, own in said["each"].items()
}
# A third of the methods on one data set, some on the others and with each kind of privacy; the rest is slow.
QUICK = {f"cifar10/{method}" for method in GROUPS["method"][::3]} | {
    "cifar10/perada/sample",
    "cifar10_vit/perada_no_kd/sample",
}
QUICK |= {"office_home/perada", "office_home/fedavg_ft", "chexpert/perada", "chexpert/ditto", "images/perada"}
QUICK |= {f"{data}/{method}" for method in ("perada", "fedavg_ft") for data in ("fashion_mnist", "cifar10_vit")}
QUICK |= {f"fashion_mnist/{method}/client" for method in ("ditto", "fed_ensemble", "fedavg_ft")}
SMALL = {
    "trainer": {"fast_dev_run": True, "accelerator": "cpu", "enable_progress_bar": False},
    "model": {"pretrained": False},
    "data": {
        "dataset": "Digits",
        "partition": {"init_args": {"num_clients": 4}},
        "train_limit": 300,
        "test_limit": 40,
        "image_size": 16,
        "batch_size": 4,
    },
    "federated": {"clients_per_round": 2},
    "distillation": {"steps": 1, "batch_size": 4},
}
PUBLISHED = {  # these recipes need the columns of their data sets
    "office_home": ("OfficeHome", partial(write_office_home, each=2)),
    "chexpert": ("CheXpert", write_chexpert),
    "images": ("Images", write_hospitals),
}
SCANNED = ("quickstart", "scanners_lite0")
"""Recipes of hospitals with scanners, which are not made by number."""
RULES_OF_LORA = ("flexlora", "lora_fair")
DISTILLING = {"perada", "perada_table5", "fed_ensemble_perada", "fedbe", "feddf"}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """An empty working directory; a ViT has one block."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    create = vision_transformer._create_vision_transformer
    monkeypatch.setattr(
        vision_transformer, "_create_vision_transformer", lambda *a, **k: create(*a, **k | {"depth": 1})
    )


@pytest.fixture(scope="module")
def write_set(tmp_path_factory):
    """The folder of each set in PUBLISHED, written when it is first asked for."""

    @cache
    def write(name):
        kind, function = PUBLISHED[name]
        folder = tmp_path_factory.mktemp(name) / "CheXpert-v1.0-small"
        function(folder)
        return {"class_path": kind, "init_args": {"root": str(folder), "size": 16, "test_share": 0.5}}

    return write


@pytest.fixture(scope="module")
def parser():
    """The parser of the command line without subcommands; the digits are read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sklearn.datasets.load_digits", cache(load_digits))
        yield PeradaCLI(["--config", "digits"], run=False).parser


def small_words(name, written=None):
    """Options with which a recipe runs in no time, on data that are there."""
    backbone = "test_vit" if "_vit" in name or "prompts" in name else "test_resnet"  # as the recipe's, in small
    public = {} if name == "digits" else {"public": None, "public_fraction": 0.1}
    # The server of a private run has none of the clients' images.
    if "privacy" in name or "private" in name or name.endswith(("/sample", "/client")):
        public = {"public": {"class_path": "Photographs", "init_args": {"count": 20, "size": 32}}}
        public |= {"public_fraction": 0.0, "validation_fraction": 0.0}
    data = SMALL["data"] | public
    first = name.split("/")[0]
    if first in PUBLISHED:
        data |= {"dataset": written(first), "num_workers": 0}
    if first in ("office_home", "images"):
        del data["partition"]  # a domain or a hospital a client
    if first == "chexpert":
        data["partition"] = {"init_args": {"num_clients": 4, "min_per_class": 0}}  # some categories have one image
    if first in SCANNED:
        del data["partition"], data["public"], data["public_fraction"]
        data["dataset"] = {"init_args": {"dataset": "Digits", "kinds": 4, "size": 16, "min_per_scanner": 2}}
    config = SMALL | {"model": SMALL["model"] | {"backbone": backbone}, "data": data}
    if data.get("validation_fraction") == 0:
        distillation = config["distillation"] | {"validate_every": 0}
        config["distillation"] = distillation
    Path("../small.yaml").write_text(yaml.safe_dump(config))
    tuned = ["--federated.algorithm.finetune_epochs=0.1"] if "fedavg_ft" in name or "fedbabu" in name else []
    return ["--config", name, "--config=../small.yaml", *tuned]


def rejection(data, method, privacy=None):
    """Words of the error with which a combination is rejected, if it is."""
    if method == "fedrod" and data == "chexpert" and privacy != "sample":
        return "FedROD requires each client's number of images per class, but images have several labels"
    if privacy == "sample" and method in ("moon", "fedrod"):
        return "its local step reads the model's outputs on private images"
    if privacy == "client" and method in RULES_OF_LORA:
        return "it is not a function of the clients' mean, and only the mean carries the noise"
    if privacy == "client" and method in ("fedex_lora", "flora"):
        return r"it merges the products B·A of the clients' factors, but would see only the noisy mean of each factor"
    if privacy == "sample" and not data.endswith("_vit") and method not in (*ADAPTER_OF, *RULES_OF_LORA):
        return "are trained BatchNorm layers: an image's gradient then depends on the other images of its batch"
    if privacy == "client" and method == "fed_ensemble":
        return r"client_privacy does not support FedEnsemble\(modes=5\): the mean of a mode covers only some"
    if privacy == "client" and method == "standalone":
        return "client_privacy does not support Standalone: its clients send nothing; leave client_privacy out"
    if privacy == "client" and method == "fedbe_no_kd":
        return r"client_privacy does not support FedBE\(distill=False\): its ensemble holds single clients' updates"
    if privacy == "client" and method in DISTILLING:
        return r"client_privacy does not support \w+ with distillation: the teachers are single clients' updates"
    return None


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in COMBINATIONS])
@pytest.mark.every(20)
def test_every_combination_runs_or_says_why_not(parser, write_set, capsys, name):
    data, method, privacy = [*name.split("/"), None][:3]
    cli = PeradaCLI(small_words(name, write_set), run=False)
    algorithm = yaml.safe_load((ROOT / "method" / f"{method}.yaml").read_text())["federated"]["algorithm"]
    assert type(cli.loop.algorithm).__name__ == (algorithm if isinstance(algorithm, str) else algorithm["class_path"])
    assert (cli.loop.privacy is not None, cli.loop.client_privacy is not None) == (
        privacy == "sample",
        privacy == "client",
    )
    message = rejection(data, method, privacy)
    if message is None:
        cli.trainer.fit(cli.model, cli.datamodule)
        cli.after_fit()
        table_of_clients(capsys, {"office_home": DOMAINS, "images": HOSPITALS}.get(data, "0123"))
    else:
        with pytest.raises(ValueError, match=message) as error:
            cli.trainer.fit(cli.model, cli.datamodule)
        assert one_line(error.value) == str(error.value)
    assert list(Path().iterdir()) == []


def table_of_clients(capsys, names="0123"):
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines] == ["client", *names, "mean ± std"]


@pytest.mark.parametrize("name", [*COMPLETE, "cifar10/perada", "fashion_mnist_vit/ditto/sample"])
@pytest.mark.every(20)
def test_recipe_runs(name, capsys):
    main(["fit", *small_words(name)])
    table_of_clients(capsys, ["negative", "noisy", "plain", "turned"] if name in SCANNED else "0123")
    assert list(Path().iterdir()) == []


PRIVATE = [
    "/".join(parts)
    for parts in product(GROUPS["data"], ("perada", "fedavg", "feddf", "fedbe", "fed_ensemble"), GROUPS["privacy"])
]


def test_no_private_recipe_gives_the_server_images_of_clients():
    for name in (*PRIVATE, "adapters_private"):
        content = yaml.safe_load(merged(name))
        data = content["data"]
        assert "privacy" in content or "client_privacy" in content, name
        assert not data.get("public_fraction"), name
        assert not data.get("validation_fraction"), name
        public = class_name(data.get("public", {}))
        assert public != class_name(data["dataset"]), name
        method = name.split("/")[1] if "/" in name else ""
        if method in DISTILLING and not name.startswith("shakespeare"):  # texts are rejected under privacy
            assert public in ("CIFAR10", "CIFAR100", "Photographs"), name


def class_name(section):
    """Return the name of a dataset, which stands alone or as the class of a section."""
    return section.get("class_path") if isinstance(section, dict) else section


def test_a_method_goes_over_a_complete_recipe(parser):
    cli = PeradaCLI([*small_words("digits"), "--config", "method/fedprox"], run=False)
    algorithm = cli.loop.algorithm
    assert (type(algorithm).__name__, algorithm.prox_strength) == ("FedProx", 0.01)  # PerAda's, below, is 1
    assert cli.config.data.public is None


def parse_options(parser, *configs):
    """All options of `perada fit`, with their defaults, but for the files that they come from."""
    words = [word for config in configs for word in ("--config", str(config))]
    given = parser.parse_args(spelt_out(words)).as_dict()
    del given["config"]
    return given


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (place % 3 > 0)) for place, name in enumerate(SPELT_OUT)]
)
@pytest.mark.every(36)
def test_combined_recipes_are_what_they_were(parser, name):
    content = {}
    for key, value in SPELT_OUT[name].items():
        section, _, option = key.rpartition(".")
        place = content
        for part in section.split(".") if section else ():
            place = place.setdefault(part, {})
        place[option] = value
    Path("whole.yaml").write_text(yaml.safe_dump(content))
    main(["cp", name, "mine.yaml"])
    assert parse_options(parser, name) == parse_options(parser, "whole.yaml") == parse_options(parser, "mine.yaml")


def test_files_merged_by_hand_are_what_the_name_says(parser):
    by_hand = parse_options(parser, "cifar10_vit", "method/ditto", "privacy/client")
    assert by_hand == parse_options(parser, "cifar10_vit/ditto/client")
    assert by_hand["client_privacy"] is not None


def test_cp_writes_one_recipe_that_says_what_it_is(capsys):
    main(["cp", "cifar10/fed_ensemble/client", "mine.yaml"])
    first, *_ = Path("mine.yaml").read_text().splitlines()
    comments = [(ROOT / f"{part}.yaml").read_text().splitlines()[0] for part in ("method/fed_ensemble", "data/cifar10")]
    assert first.startswith("# " + "; ".join(line.strip("# .") for line in comments) + "; DP-FedAvg")
    assert "(lr_schedule: exponential)" in Path("mine.yaml").read_text()
    content = yaml.safe_load(Path("mine.yaml").read_text())
    assert "public" not in content["data"]
    assert content["model"] == {"backbone": "resnet18", "adapter": "full"}
    assert content["training"] == {
        "lr_personal": 0.01,
        "lr_local": 0.01,
        "local_epochs": 10,
        "lr_schedule": "exponential",
    }
    main(["cp", "cifar10/ditto", "."])
    assert "perada fit --config ditto.yaml" in capsys.readouterr().out


def test_recipes_are_found_by_name():
    assert len(SPELT_OUT) == 36
    names = [*COMPLETE, *COMPARISONS, *OF_SITES, *GROUPS["data"]]
    names += [f"{group}/{name}" for group in ("method", "privacy", "paper") for name in GROUPS[group]]
    assert sorted(shipped_recipes()) == sorted(names)  # a name for each file, and none for combinations
    for name in [*names, *SPELT_OUT, *COMBINATIONS]:
        parts = name.split("/")
        if parts[0] in GROUPS["data"]:
            expected = [ROOT / group / f"{part}.yaml" for group, part in zip(FOLDERS, parts, strict=False)]
        else:
            expected = [ROOT / f"{name}.yaml"]
        assert find_recipe(name) == expected
    assert find_recipe("cifar10/ditto.yaml") == [ROOT / "data" / "cifar10.yaml", ROOT / "method" / "ditto.yaml"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cifar10/dito", "'cifar10/ditto'"),
        ("cifar10/ditto/sampel", "'cifar10/ditto/sample'"),
        ("cifar10/ditto/sample/client", "'cifar10/ditto/sample'"),
        ("cifar10/xyzzy", "'cifar10'"),
        ("cifr10/ditto", "'cifar10/ditto'"),
        ("method/dito", "'method/ditto'"),
    ],
)
def test_a_wrong_part_of_a_combination_proposes_the_nearest(name, meant):
    with pytest.raises(FileNotFoundError, match=f"did you mean {meant}"):
        find_recipe(name)


def test_recipes_in_a_list_are_rejected_with_the_way_to_combine_them():
    with pytest.raises(FileNotFoundError, match=r"--config cifar10 --config method/ditto$"):
        find_recipe("cifar10, method/ditto")


@pytest.mark.parametrize("name", ["digits/ditto", "cifar10/sample", "sample/cifar10", "paper/perada_table1"])
def test_what_cannot_be_combined_is_rejected(name):
    with pytest.raises(FileNotFoundError, match=f"'{name}' is neither a file nor a recipe"):
        find_recipe(name)


def test_ls_shows_the_groups_and_how_to_combine_them_on_one_screen(parser, capsys):
    main(["ls"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 52 and max(map(len, text.splitlines())) <= 100
    *blocks, end = text.strip().split("\n\n")
    data, methods, privacy, papers, complete = ([line.split() for line in block.splitlines()[1:]] for block in blocks)
    assert [row[0] for row in data] == GROUPS["data"]
    assert sorted(name for row in methods for name in row) == GROUPS["method"]
    assert [row[0] for row in privacy] == GROUPS["privacy"]
    assert [row[0] for row in complete] == sorted([*COMPLETE, *COMPARISONS, *OF_SITES])
    for name, *words in (*data, *privacy, *complete):
        if name in GROUPS["privacy"]:
            name = f"privacy/{name}"
        (path,) = find_recipe(name)
        description = path.read_text().splitlines()[0].removeprefix("# ")
        beginning = " ".join(words)
        assert description.startswith(beginning)
        # The line ends where the sentence or a clause of it ends.
        assert description[len(beginning) :][:1] in ("", ",", ":", ";")
        assert len(words) > 3
    figures = {f"{paper.removesuffix('*')}{figure}" for paper, *figures in papers for figure in figures}
    assert all(any(name.startswith(figure) for figure in figures) for name in GROUPS["paper"])
    assert all(any(name.startswith(figure) for name in GROUPS["paper"]) for figure in figures)
    example = next(line.split() for line in end.splitlines() if line.count("--config") == 3)
    one_name = next(line.split() for line in end.splitlines() if line.count("--config") == 1)[-1]
    assert parse_options(parser, *example[3::2]) == parse_options(parser, one_name)
    assert rejection(*one_name.split("/")) is None


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("method", [f"method/{name}" for name in GROUPS["method"]]),
        ("data", GROUPS["data"]),
        ("paper/fed_ensemble_table4", ["paper/fed_ensemble_table4", "paper/fed_ensemble_table4_mini"]),
        ("cifar10", ["cifar10", "cifar10_vit"]),
        ("ditto", ["method/ditto"]),
    ],
)
def test_ls_of_a_group_or_a_prefix_prints_full_descriptions(prefix, names, capsys):
    main(["ls", prefix])
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in rows] == names
    for name, text in rows:
        (path,) = find_recipe(name)
        assert path.read_text().startswith(f"# {text}\n")


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("cifar10_vit/ditto", ["cifar10_vit/ditto", "cifar10_vit/ditto/client", "cifar10_vit/ditto/sample"]),
        ("cifar10/fedav", ["cifar10/fedavg", "cifar10/fedavg_ft"]),
        ("cifar10/ditto/s", ["cifar10/ditto/sample"]),
        ("cifar10/", [f"cifar10/{name}" for name in GROUPS["method"]]),
    ],
)
def test_ls_of_a_combination_describes_each_of_its_recipes(prefix, names, capsys):
    main(["ls", prefix])
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in rows] == names
    for name, text in rows:
        for path in find_recipe(name):
            assert path.read_text().splitlines()[0].removeprefix("# ").removesuffix(".") in text


@pytest.mark.parametrize(
    ("wrong", "meant"), [("methdo", "'method'"), ("cifar10_vit/dito", "'cifar10_vit/ditto'"), ("cifar10/x/sample", "")]
)
def test_ls_of_nothing_proposes_the_nearest(wrong, meant):
    remedy = f"did you mean {meant}" if meant else "`perada ls` lists the recipes"
    with pytest.raises(ValueError, match=f"'{wrong}'; {remedy}"):
        main(["ls", wrong])


@pytest.mark.slow
def test_compare_takes_combined_names_and_tells_their_methods_apart(capsys):
    names = ["fashion_mnist/ditto", "fashion_mnist/standalone"]
    main(["compare", *names, "--output", "r.json", *small_words("fashion_mnist")[2:], "--trainer.fast_dev_run=false",
          "--trainer.max_epochs=1", "--training.local_steps=1"])  # fmt: skip
    records = [record for record in json.loads(Path("r.json").read_text()) if record["stage"] == "run"]
    assert [record["label"] for record in records] == names
    assert len({record["digest"] for record in records}) == 2
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    # In the table of scores, and in that of the differences.
    assert [row for row in rows if row in names] == [*names, *names]


def test_recipes_say_what_they_are_and_fix_their_seeds():
    for path in FILES:
        text = path.read_text()
        lines = text.splitlines()
        assert lines[0].startswith("# "), path
        assert lines[0].endswith("."), path
        check_recipe(path, lines, yaml.safe_load(text))


def check_recipe(path, lines, content):
    """Assert that a recipe has the sections of its folder."""
    if path.parent.name == "privacy":
        section = {"sample": "privacy", "client": "client_privacy"}[path.stem]
        assert list(content) == ["data", "federated", section, "evaluation"], path
        return
    if path.parent.name == "paper":
        assert lines[1].startswith(("# The paper ", "# The paper's ")), path
        return
    if path.stem in COMPARISONS:
        # Other sections are options of all runs, beside the recipes that are compared.
        assert content["compare"]["recipes"], path
        assert content.keys() <= {"compare", "trainer", "data", "evaluation"}, path
        return
    if path.parent.name != "data":
        algorithm = content["federated"]["algorithm"]
        assert algorithm["class_path" if isinstance(algorithm, dict) else 0], path
    if path.parent.name != "method":
        assert isinstance(content["seed_everything"], int), path
        assert content["trainer"]["max_epochs"] > 0, path


@pytest.mark.slow
def test_the_comparison_of_hospitals_gives_each_method_its_own_settings(monkeypatch):
    """That on the larger network takes the settings over."""
    plan = plan_of(monkeypatch, "hospitals")
    other = plan_of(monkeypatch, "hospitals_lite0")
    assert set(other.settings) - set(plan.settings) == {"perada_no_kd"}
    assert {name: other.settings[name] for name in plan.settings} == plan.settings
    clis = {row[1]: plan.make_cli(plan.job(row, 0, "run", {}).args) for row in plan.rows}
    adapters = {name: cli.model.adapter for name, cli in clis.items()}
    # What methods send differs by the method only.
    assert adapters == dict.fromkeys(clis, "residual")
    assert len(adapters) == 7
    for cli in clis.values():
        assert cli.loop.clients_per_round is None
        assert cli.config.data.public_fraction == 0
        assert cli.config.model.adapter_options == clis["perada"].config.model.adapter_options
        assert cli.config.training.local_epochs == clis["perada"].config.training.local_epochs


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("perada_table5_mini", "perada_figure7_mini") else pytest.mark.slow)
        for name in GROUPS["paper"]
    ],
)
@pytest.mark.every(2)
def test_comparisons_of_papers_are_ones_that_can_be_run(name, monkeypatch):
    """All their options are parsed, for every row and value."""
    if name in BACKBONES_OF_STARTS:
        # A user makes this file as the recipe's comment says.
        Path("fedavg_start").mkdir()
        weights = timm.create_model(BACKBONES_OF_STARTS[name]).state_dict()
        save_file(weights, "fedavg_start/model.safetensors")
    plan = plan_of(monkeypatch, f"paper/{name}")
    content = yaml.safe_load((ROOT / "paper" / f"{name}.yaml").read_text())
    said = content["compare"]
    values = [len(values) for values in said.get("vary", {}).values()]
    variants = max(1, len(said.get("variants", {})))
    algorithms = max(1, len(said.get("algorithms", [])))
    assert len(plan.rows) == len(said["recipes"]) * algorithms * variants * math.prod(values)
    assert plan.seeds == [0, 1, 2]
    assert said["output"] == f"{name}.json"
