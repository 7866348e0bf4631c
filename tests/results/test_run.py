# SPDX-License-Identifier: Apache-2.0
"""What comes out of a run, saved and loaded: by ``Run.load`` and by plain PEFT."""

import json
import math
import shutil
from dataclasses import asdict

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

import perada
from perada.privacy import ClientPrivacy, Privacy
from perada.results.cards import privacy_card
from tests.digests import undigested
from tests.options import sections

NAMES = [
    ("test_resnet", "residual"),
    ("net", "full"),
]
MORE = [("net", "head"), *(("test_resnet", method) for method in ("lora", "bias_norm", "full", "head"))]
MORE += [*(("test_vit", method) for method in ("bottleneck", "prompt", "lora", "dual_lora", "ia3", "full", "head"))]


def images(tiny, backbone):
    """Data of the size that the backbone takes."""
    if backbone == "net":
        return tiny.data()
    data = tiny.data(sizes=(4, 3), public=False)
    size = 32 if backbone == "test_resnet" else 160
    for part in (*data.train, *data.test):
        x = torch.nn.functional.interpolate(part.tensors[0], size=(size, size))
        part.tensors = (x.expand(-1, 3, -1, -1), part.tensors[1])
    return data


def make_run(tiny, backbone="net", method="full", **options):
    settings = tiny.options | {"adapter": method, "rounds": 1, "logger": False, "pretrained": False}
    settings |= {"distill_steps": None, "local_steps": 2}
    network = tiny.net() if backbone == "net" else backbone
    return perada.finetune(network, images(tiny, backbone), **sections(**(settings | options)))


@pytest.fixture(scope="module")
def saved_run(tiny, tmp_path_factory):
    """A run of a network of the caller's own with a trained head, saved; tests copy what they break."""
    folder = tmp_path_factory.mktemp("run")
    make_run(tiny, method="head").export(folder)
    return folder


@pytest.mark.parametrize(
    ("backbone", "method"), [*NAMES, *(pytest.param(*names, marks=pytest.mark.slow) for names in MORE)]
)
def test_saved_models_predict_the_same_logits(tiny, tmp_path, backbone, method):
    run = make_run(tiny, backbone, method)
    run.export(tmp_path)
    custom_network = tiny.net() if backbone == "net" else None
    loaded = perada.Run.load(tmp_path, backbone=custom_network)
    x = torch.cat([part.tensors[0] for part in images(tiny, backbone).test])[:8]
    models = {"global": run.global_model(), **{f"client_{m}": run.personal(m) for m in range(run.num_clients)}}
    again = {"global": loaded.global_model(), **{f"client_{m}": loaded.personal(m) for m in range(run.num_clients)}}
    frozen = load_file(tmp_path / "backbone.safetensors")
    outputs = []
    for folder, model in models.items():
        if custom_network is None:
            plain = timm.create_model(backbone, num_classes=3)
        else:
            plain = tiny.net(seed=1)
        plain.load_state_dict(frozen, strict=True)
        peft = PeftModel.from_pretrained(plain, str(tmp_path / folder)).eval()
        with torch.no_grad():
            expected = model(x)
            assert torch.equal(again[folder](x), expected)
            assert torch.equal(peft(x), expected)
        outputs.append(expected)
    assert not torch.equal(outputs[0], outputs[1])
    assert loaded.num_clients == run.num_clients
    assert loaded.metrics == run.metrics
    assert loaded.info == run.info


def test_a_run_shows_what_it_is(tiny, tmp_path):
    run = make_run(tiny, algorithm="fedavg", rounds=2)
    assert repr(run) == f"<Run: FedAvg, {run.num_clients} clients, 2 rounds>"
    assert repr(perada.Run.load(run.export(tmp_path), backbone=tiny.net())) == repr(run)


def test_states_are_named_as_in_the_models_they_make(tiny):
    run = make_run(tiny, "test_resnet", "residual")
    for role, model in (("global", run.global_model()), ("personal", run.personal(1))):
        state = run.state(role, 1 if role == "personal" else None)
        full = model.state_dict()
        assert all(torch.equal(full[name], value) for name, value in state.items())
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == {name for name in state if name in dict(model.named_parameters())}
        assert not model.training
    assert any("running_mean" in name for name in state)


def test_models_and_states_are_copies(tiny):
    run = make_run(tiny)
    before = run.state("personal", 0)
    for model in (run.personal(0), run.personal(1), run.global_model()):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
    for value in run.state("personal", 0).values():
        value.fill_(8)
    run.state("global")["7.weight"].fill_(9)
    assert all(torch.equal(before[key], value) for key, value in run.state("personal", 0).items())
    assert all(torch.equal(before[key], run.personal(0).state_dict()[key]) for key in before)


@pytest.mark.parametrize("client", [None, -1, 5])
def test_unknown_clients_and_roles_are_rejected(tiny, client):
    run = make_run(tiny, rounds=0)
    with pytest.raises(ValueError, match=r"client must be an integer >= 0 and <= 4, got .*"):
        run.state("personal", client)
    with pytest.raises(ValueError, match="role='local' is not kept"):
        run.state("local", 0)


def test_a_client_without_test_images_is_null_in_the_file(tiny, tmp_path):
    data = tiny.data()
    data.test[2] = TensorDataset(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    run = tiny.finetune(data, rounds=1, logger=False)
    assert math.isnan(run.metrics["clients"]["personal/local_test"][2])
    run.export(tmp_path)
    text = (tmp_path / "run.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    loaded = perada.Run.load(tmp_path, backbone=tiny.net()).metrics["clients"]["personal/local_test"]
    assert math.isnan(loaded[2])
    assert loaded[:2] == run.metrics["clients"]["personal/local_test"][:2]


def private_record(clients=5):
    """A record as a private run has it, of training with noise in all clients but the last."""
    release = [2.0 + client for client in range(clients - 1)] + [math.inf]
    return {
        "sample": {
            "options": asdict(Privacy(noise_multiplier=1.0)),
            "noise_multipliers": [1.0] * (clients - 1) + [0.0],
            "sample_rates": [0.25] * clients,
            "server": [value / 2 for value in release],
            "release": release,
        },
        "client": {"options": asdict(ClientPrivacy(2.0)), "noise_multiplier": 2.0, "epsilon": [0.5] * clients},
    }


def test_what_a_private_run_says_of_its_privacy_is_kept(tiny, tmp_path):
    run = make_run(tiny, method="head")
    run.info["privacy"] = private_record()
    del run.metrics["partition"], run.metrics["predictions"]  # which no private run has
    run.metrics["clients"]["privacy/release_epsilon"] = run.info["privacy"]["sample"]["release"]
    run.metrics["rounds"][0]["privacy/release_epsilon_max"] = math.inf
    run.metrics["rounds"][0]["train/local_loss"] = -math.inf
    run.export(tmp_path)
    text = (tmp_path / "run.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    loaded = perada.Run.load(tmp_path, backbone=tiny.net())
    assert loaded.info == run.info
    scored = ("personal/", "global/", "train/")
    counted = [{name: own for name, own in row.items() if not name.startswith(scored)} for row in run.metrics["rounds"]]
    clients = {"privacy/release_epsilon": run.info["privacy"]["sample"]["release"]}
    assert loaded.metrics == {"rounds": counted, "clients": clients}
    assert loaded.info["privacy"]["sample"]["options"]["max_epsilon"] is None
    loaded.export(tmp_path / "again")
    assert (tmp_path / "again" / "run.json").read_text() == text
    card = tmp_path / "client_1" / "README.md"
    assert (tmp_path / "again" / "client_1" / "README.md").read_text() == card.read_text()


def test_each_folder_of_a_private_run_has_its_own_section(tiny, tmp_path):
    run = make_run(tiny, method="head")
    run.export(tmp_path / "open")
    plain = (tmp_path / "open" / "client_0" / "README.md").read_text()
    assert "Privacy" not in plain
    run.info["privacy"] = private_record()
    run.export(tmp_path)
    for folder, client in [("global", None), *((f"client_{client}", client) for client in range(5))]:
        text = (tmp_path / folder / "README.md").read_text()
        assert text.startswith(plain[: plain.index("# The")])
        assert text.count("## Privacy") == 1
        assert privacy_card(run.info["privacy"], client) in text
    run.export(tmp_path)  # in its own place
    assert (tmp_path / "client_4" / "README.md").read_text() == text
    assert ModelCard.load(tmp_path / "client_4" / "README.md").data["library_name"] == "peft"
    card = tmp_path / "client_4" / "README.md"
    card.write_text(card.read_text() + "\n## Privacy of my own\n")
    run.export(tmp_path)
    assert "## Privacy of my own" in card.read_text()
    assert card.read_text().count("## Privacy\n") == 1
    del run.info["privacy"]
    run.export(tmp_path)
    assert "## Privacy\n" not in card.read_text()
    assert (tmp_path / "client_3" / "README.md").read_text() == (
        tmp_path / "open" / "client_3" / "README.md"
    ).read_text()


def test_clients_without_adapters_of_their_own_have_the_global_ones_section(tiny, tmp_path):
    run = make_run(tiny, method="head", algorithm="fedavg")
    run.info["privacy"] = private_record()
    run.export(tmp_path)
    assert privacy_card(run.info["privacy"], None) in (tmp_path / "client_1" / "README.md").read_text()


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def truncate(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


def change_tensors(name, change):
    def edit(folder):
        tensors = load_file(folder / name)
        save_file(change(tensors), folder / name)

    return edit


def without_first(tensors):
    return dict(list(tensors.items())[1:])


def with_extra(tensors):
    return tensors | {"base_model.model.9.weight": torch.zeros(2)}


def with_first_filled(number):
    def change(tensors):
        first, value = next(iter(tensors.items()))
        return tensors | {first: torch.full_like(value, number)}

    return change


def with_other_shapes(tensors):
    return {key: torch.zeros(*value.shape, 2) for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("run.json"), "is not a finished run: it has neither adapters"),
        (write("run.json", "{"), "run.json' is broken"),
        (write("run.json", '{"num_clients": 5}'), "run.json' is broken"),
        (
            write("run.json", '{"format": 99, "num_clients": 5, "info": {}, "metrics": {}}'),
            "run.json' has format 99, but .* 2; read it with",
        ),
        (remove("client_2/adapter_model.safetensors"), r"client_2'.*adapter_model"),
        (remove("global/adapter_config.json"), "global' is not an adapter folder: it has no adapter_config"),
        (truncate("client_1/adapter_model.safetensors"), "client_1/adapter_model.safetensors' cannot be read"),
        (write("client_1/adapter_model.safetensors", ""), "client_1/adapter_model.safetensors' cannot be read"),
        (write("global/adapter_config.json", "not json"), "configuration in .*global' cannot be read"),
        (write("global/adapter_config.json", '{"peft_type": "NOSUCH"}'), "configuration in .*global' cannot be read"),
        (write("client_0/adapter_config.json", '{"peft_type": "LORA"}'), "client_0'.*a different"),
        (
            change_tensors("client_0/adapter_model.safetensors", without_first),
            "client_0' belongs to a different.*' is missing",
        ),
        (
            change_tensors("client_0/adapter_model.safetensors", with_extra),
            "client_0' belongs to a different.*expected missing",
        ),
        (
            change_tensors("client_0/adapter_model.safetensors", with_other_shapes),
            r"client_0'.*2",
        ),
        (
            change_tensors("client_3/adapter_model.safetensors", with_first_filled(math.nan)),
            "client_3' is broken: '.*' is not finite",
        ),
        (
            change_tensors("global/adapter_model.safetensors", with_first_filled(-math.inf)),
            "global' is broken: '.*' is not finite",
        ),
        (change_tensors("backbone.safetensors", with_other_shapes), "backbone.safetensors' does not match backbone"),
        (truncate("backbone.safetensors"), "backbone.safetensors'"),
        (remove("backbone.safetensors"), "backbone.safetensors"),
    ],
)
def test_broken_folders_are_named(saved_run, tiny, tmp_path, damage, message):
    folder = undigested(shutil.copytree(saved_run, tmp_path / "copy"))
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        perada.Run.load(folder, backbone=tiny.net())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fact", ["training", "train_backbone", "global_model", "built_for"])
def test_a_fact_that_every_run_has_is_missed(fact, saved_run, tiny, tmp_path):
    folder = undigested(shutil.copytree(saved_run, tmp_path / "copy"))
    content = json.loads((folder / "run.json").read_text())
    del content["info"][fact]
    (folder / "run.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"run.json' is broken .*{fact}"):
        perada.Run.load(folder, backbone=tiny.net())


def test_another_backbone_is_rejected(saved_run, tiny):
    with pytest.raises(ValueError, match=r"custom network, .*backbone=$"):
        perada.Run.load(saved_run)
    with pytest.raises(ValueError, match="3"):
        perada.Run.load(saved_run, backbone=tiny.net(classes=4))
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    with pytest.raises(ValueError, match=r"another backbone|does not (fit|match) backbone"):
        perada.Run.load(saved_run, backbone=other)


def test_another_rank_is_rejected(tiny, tmp_path):
    narrow = make_run(tiny, "test_resnet", "lora", adapter_options={"r": 2}, rounds=0)
    wide = make_run(tiny, "test_resnet", "lora", adapter_options={"r": 4}, rounds=0)
    narrow.export(tmp_path / "narrow")
    undigested(wide.export(tmp_path / "wide"))
    (tmp_path / "wide" / "client_1").rename(tmp_path / "aside")
    (tmp_path / "narrow" / "client_1").rename(tmp_path / "wide" / "client_1")
    with pytest.raises(ValueError, match=r"client_1'.*r is 2, expected 4") as error:
        perada.Run.load(tmp_path / "wide")
    assert "\n" not in str(error.value)


def test_the_size_that_the_datamodule_resized_to_is_told(tiny, tmp_path):
    """The run is loaded all the same: its backbone was built for its own size."""
    sets = [
        TensorDataset(torch.randint(0, 255, (4, 3, 8, 8), dtype=torch.uint8), torch.arange(4) % 2) for _ in range(2)
    ]
    settings = tiny.options | {"adapter": "head", "rounds": 1, "local_steps": 1, "logger": False, "pretrained": False}
    settings |= {"distill_steps": None, "batch_size": None, "algorithm": "fedavg"}
    for backbone, size in (("test_resnet", 32), ("test_vit", 160)):
        data = perada.FederatedDataModule(perada.FederatedData(sets), image_size=size, batch_size=4)
        run = perada.finetune(backbone, data, **sections(**settings))
        assert run.info["image_size"] == size
        x = torch.randn(2, 3, size, size)
        loaded = perada.Run.load(run.export(tmp_path / backbone))
        assert loaded.info == run.info
        assert torch.equal(loaded.global_model()(x), run.global_model()(x))
