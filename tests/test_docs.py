# SPDX-License-Identifier: Apache-2.0
"""The code in the documentation runs; CONTRIBUTING.md says how its blocks are marked."""

import base64
import io
import itertools
import math
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.distributed.run import get_args_parser

import perada
from benchmarks.__main__ import BENCHMARKS
from perada.algorithms import make_algorithm
from perada.cli import main
from perada.cli.main import COMMANDS
from perada.cli.options import reject_unknown_options
from perada.cli.recipes import is_comparison
from perada.data.sets.scanners import DEVICES
from perada.data.shifts import GROUPS, corrupt
from perada.studies.choose import search as choosing
from perada.studies.compare import command as comparing
from perada.studies.compare import launcher
from tests.options import sections

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("make", "perada", "pip", "torchrun", "docker", "sudo")
BASH = shutil.which("bash")
SMALL = (
    "--trainer.enable_progress_bar=false",
    "--data.train_limit=200",
    "--data.test_limit=40",
    "--data.partition.num_clients=8",
    "--training.local_steps=1",
    "--distillation={steps: 1, batch_size: 4}",
)


class Block(NamedTuple):
    """A fenced block: its language, its code, and what the comment above it says."""

    language: str
    code: str
    note: str = ""


def blocks(page):
    fence = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(language, code, note) for note, language, code in fence.findall((ROOT / page).read_text())]


def with_blocks(*languages):
    return [page for page in PAGES if any(block.language in languages for block in blocks(page))]


def test_every_fence_is_a_block_that_a_test_knows():
    for page in PAGES:
        known = blocks(page)
        assert (ROOT / page).read_text().count("```") == 2 * len(known), page
        for language, code, note in known:
            assert language in ("python", "shell", "yaml", "text"), (page, code)
            assert note == "" or re.fullmatch(r"test: parse only, since \w+ .+|file: \w+\.py", note), (page, note)


CODE_WIDTH = 84
"""Characters of a line of code that fit beside the site's navigation on a screen 1,280 pixels wide."""


LONG_WORD = 50
"""Characters of a word of a command, such as a value in JSON, from which on its line may be wider."""


def test_no_blank_line_cuts_a_table_in_two():
    """The rows behind it would be shown as text."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
            _, _, rows = table.partition("\n")
            assert re.match(r"\|[ :|-]+\|", rows), f"{page} has rows without a head: {table[:80]!r}"


def test_lines_of_code_fit_the_width_of_a_page():
    for page in PAGES:
        long_lines = []
        for block in blocks(page):
            for line in block.code.splitlines() if block.language != "text" else ():
                words = re.findall(r"(?:'[^']*'|\S)+", line)
                has_long_word = block.language == "shell" and max(map(len, words), default=0) > LONG_WORD
                if len(line) > CODE_WIDTH and not has_long_word:
                    long_lines.append(line)
        assert long_lines == [], page


def commands(tree=COMMANDS, prefix=""):
    """The names of all commands."""
    names = set()
    for name, (entry, _) in tree.items():
        names |= {prefix + name} if isinstance(entry, str) else commands(entry, f"{prefix}{name} ")
    return names


class Reader:
    """Follows a page in an empty folder, as somebody would who has little time: one round of one step."""

    def __init__(self, folder, monkeypatch, capsys):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.names = {"__name__": "page"}
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in PROGRAMS:  # bash does the parsing, and these write down what it would have run
            program = self.programs / name
            program.write_text(f"#!/bin/sh\nprintf '%s\\037' {name} \"$@\" >> $WORDS; echo >> $WORDS\n")
            program.chmod(0o755)
        which = self.programs / "which"
        which.write_text('#!/bin/sh\ncommand -v "$1"\n')
        which.chmod(0o755)
        finetune = perada.finetune

        def short(backbone, data, **options):
            options |= {"rounds": 1, "local_steps": 1, "enable_progress_bar": False}
            options.pop("local_epochs", None)
            if "distill_steps" in options or getattr(data, "public", None) is not None:
                options |= {"distill_steps": 1, "distill_batch_size": 8}
            return finetune(backbone, data, **sections(**options))

        monkeypatch.setattr(perada, "finetune", short)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)

    def follow(self, page):
        for block in blocks(page):
            getattr(self, block.language)(block)
        return self.names

    def text(self, block):
        pass

    def python(self, block):
        if block.note.startswith("file: "):
            with (self.folder / block.note.removeprefix("file: ")).open("a") as file:
                file.write(block.code)
            return
        code = compile(block.code, "page", "exec")
        if not block.note:
            exec(code, self.names)

    def yaml(self, block):
        (self.folder / "overlay.yaml").write_text(block.code)
        self.capsys.readouterr()
        if is_comparison(self.folder / "overlay.yaml"):
            self.parsed(["compare", "overlay.yaml"])
            return
        self.parsed(["fit", "--config", "digits", "--config", "overlay.yaml"])
        printed = self.capsys.readouterr().out
        for word in re.findall(r"(?:class_path|dataset|partition|base): ([\w.]+)", block.code):
            assert word in printed, f"{word} of the overlay is not in the configuration"

    def shell(self, block):
        words = self.folder / "words"
        words.unlink(missing_ok=True)
        environment = {"PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}", "WORDS": str(words)}
        if block.note:
            # Other programs must not run, since they may install something or not be there.
            subprocess.run([BASH, "-nc", block.code], cwd=self.folder, check=True)
            environment["PATH"] = str(self.programs)
        subprocess.run(
            [BASH, "-uc" if block.note else "-euc", block.code], env=environment, cwd=self.folder, check=not block.note
        )
        for line in words.read_text().splitlines() if words.exists() else ():
            program, *arguments = line.removesuffix("\037").split("\037")
            getattr(self, program)(arguments, bool(block.note))

    def make(self, arguments, parse_only):
        makefile = (ROOT / "Makefile").read_text()
        targets = re.findall(r"^([\w-]+(?: [\w-]+)*):(?! export)", makefile, re.MULTILINE)
        variables = {word.split("=")[0] for word in arguments if "=" in word}
        assert {word for word in arguments if "=" not in word} <= set(" ".join(targets).split())
        assert all(f"$({name})" in makefile for name in variables)

    def pip(self, arguments, parse_only):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert arguments[0] == "install"
        name, _, extras = arguments[1].removesuffix("]").partition("[")
        assert name in (project["name"], ".")  # a dot in a clone
        assert set(filter(None, extras.split(","))) <= set(project["optional-dependencies"])

    def sudo(self, arguments, parse_only):
        """A command of perada as another user."""
        assert arguments[0] == "-u" and parse_only
        program, *words = arguments[2:]
        assert Path(program).name == "perada"
        self.parsed(words)

    def docker(self, arguments, parse_only):
        """Files, services and profiles exist, and commands of perada in a container are read by its parsers."""
        assert parse_only
        if "-f" in arguments:
            assert (ROOT / arguments[arguments.index("-f") + 1]).is_file()
        if arguments[0] != "compose":
            return
        compose = yaml.safe_load((ROOT / "container" / "compose.yaml").read_text())
        services = compose["services"]
        if "--profile" in arguments:
            profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
            assert arguments[arguments.index("--profile") + 1] in profiles
        words = [word for word in arguments[3:] if not word.startswith("-")]
        if words[0] in ("run", "exec"):
            assert words[1] in services
            inside = arguments[arguments.index(words[1]) + 1 :]
            if inside[0] == "perada":
                self.parsed(inside[1:])
        elif words[0] == "cp":
            assert {word.partition(":")[0] for word in words[1:3]} & set(services)

    def torchrun(self, arguments, parse_only):
        parsed = get_args_parser().parse_args(arguments)
        assert Path(parsed.training_script).name == "perada"
        self.perada(parsed.training_script_args, parse_only)

    def perada(self, arguments, parse_only):
        if parse_only:
            self.parsed(arguments)
        elif arguments[0] in ("fit", "test"):
            main([*arguments, *self.small(arguments), f"--trainer.max_epochs={1 + ('--ckpt_path' in arguments)}"])
        elif arguments[0] == "compare":
            main([*arguments, *self.small(arguments), "--trainer.max_epochs=1", "--seeds", "0"])
        else:
            main([*arguments, *(["--quick"] if arguments[0] == "study" and arguments[1:] else [])])

    def small(self, arguments):
        """Options with which a command takes little time."""
        # The clients of these are hospitals, which are not made by number.
        hospitals = any(word.startswith(("images", "quickstart", "hospitals")) for word in arguments)
        hospitals |= "mine.yaml" in arguments and "Scanners" in (self.folder / "mine.yaml").read_text()
        return [word for word in SMALL if not (hospitals and "num_clients" in word)]

    def parsed(self, arguments):
        """Only parse a command line, by the real parser."""
        if arguments[0] in ("choose", "compare"):

            class Parsed(Exception):
                pass

            def stop(comparison):
                raise Parsed

            with self.monkeypatch.context() as patch, pytest.raises(Parsed):
                patch.setattr(comparing.ComparisonRunner, "run", stop)
                # There is no cluster to ask.
                patch.setattr(launcher, "check_cluster", lambda options, threads: None)
                patch.setattr(launcher, "cluster_runner", lambda *arguments: nullcontext())
                patch.setattr(choosing.Search, "run", stop)
                main(
                    ["perada" if word == "all" else word for word in arguments]
                )  # to parse each would take half a minute
            return
        if arguments[0] == "deploy":
            depth = 3 if arguments[1] == "keys" else 2
            command = " ".join(arguments[:depth])
            assert command in commands()
            reject_unknown_options(command, arguments[depth:])
            return
        if arguments[0] == "report" or (arguments[0] == "predict" and "--config" not in arguments):
            # They have no option that only parses.
            reject_unknown_options(arguments[0], arguments[1:])
            return
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--print_config"])
        assert not ended.value.code


@pytest.fixture
def reader(tmp_path, monkeypatch, capsys):
    return Reader(tmp_path, monkeypatch, capsys)


APART = ("README.md", "docs/privacy.md")


FOLLOWED = [page for page in with_blocks("python", "shell", "yaml") if page not in APART]
LONG = (
    "adapters",
    "algorithms",
    "choosing",
    "compare",
    "data",
    "diagnostics",
    "extending",
    "getting-started",
    "inference",
    "joining",
    "own_images",
    "performance",
    "private_training",
    "recipes",
    "report",
    "results",
    "secure_sums",
    "shifts",
    "studies/",
)


# Runs are shortened to a step, after which a client that joins may well have a worse model.
@pytest.mark.filterwarnings("ignore:client 'newcomer'. its personal model is worse:UserWarning")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * page.removeprefix("docs/").startswith(LONG)) for page in FOLLOWED],
)
def test_the_blocks_of_a_page_run(reader, page):
    reader.follow(page)


def test_each_row_of_choosing_has_a_command():
    text = (ROOT / "docs" / "choosing.md").read_text()
    rows = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert rows == [str(number) for number in range(1, len(rows) + 1)]
    numbered = [comment for block in blocks("docs/choosing.md") for comment in re.findall(r"# (\d[^:\n]*)", block.code)]
    assert {number for comment in numbered for number in re.findall(r"\d+", comment)} == set(rows)


def metrics_of_the_glossary():
    return set(re.findall(r"`(\w+/\w+)`", (ROOT / "docs" / "glossary.md").read_text()))


@pytest.mark.slow
def test_the_readmes_blocks_run(reader):
    names = reader.follow("README.md")
    run = names["run"]
    assert isinstance(run, perada.Run)
    assert run.num_clients == 12
    assert names["model"](torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert (reader.folder / "my_run" / "personal.safetensors").is_file()
    measured = {name for row in run.metrics["rounds"] for name in row if "/" in name}
    assert "personal/local_test_std" in measured
    assert measured <= metrics_of_the_glossary()


def figure_script():
    return runpy.run_path(str(ROOT / "docs" / "home_and_abroad.py"))


def test_the_figure_of_the_readme_is_drawn_from_its_table():
    drawing = figure_script()
    methods = drawing["read_table"]((ROOT / "README.md").read_text())
    assert list(methods) == yaml.safe_load((ROOT / "recipes" / "hospitals.yaml").read_text())["compare"]["algorithms"]
    figure = (ROOT / "docs" / "home_and_abroad.svg").read_text()
    assert figure == drawing["draw_figure"](methods)


def test_methods_with_two_models_have_a_row_of_both_in_the_readme():
    drawing = figure_script()
    methods = drawing["read_table"]((ROOT / "README.md").read_text())
    for name, method in methods.items():
        algorithm = make_algorithm(name)
        has_personal = algorithm.inference == "personal" or algorithm.personalization() is not None
        assert (method.personal is not None) == (has_personal and algorithm.global_model), name


SVG = {"svg": "http://www.w3.org/2000/svg"}


def test_the_figure_shows_the_scores_and_covers_no_name():
    root = ElementTree.parse(ROOT / "docs" / "home_and_abroad.svg").getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    font_size = float(root.attrib["font-size"])
    assert font_size * 340 / width > 11  # pixels of a letter where the figure fills a phone
    circles = [
        [float(circle.attrib[name]) for name in ("cx", "cy", "r")] for circle in root.iterfind("svg:circle", SVG)
    ]
    labels = [text for text in root.iterfind("svg:text", SVG) if "class" in text.attrib]

    # Places are a straight line of the scores, which follow from the ticks of the axes.
    ticks = [text for text in root.iterfind("svg:text", SVG) if (text.text or "").isdigit()]
    across = sorted((int(text.text), float(text.attrib["x"])) for text in ticks if "middle" in text.attrib.values())
    up = sorted((int(text.text), float(text.attrib["y"])) for text in ticks if "end" in text.attrib.values())
    expected = []
    for method in figure_script()["read_table"]((ROOT / "README.md").read_text()).values():
        for scores in (method.personal, method.best):
            if scores is not None:
                x = np.polyval(np.polyfit(*zip(*across, strict=True), 1), scores.home)
                y = np.polyval(np.polyfit(*zip(*up, strict=True), 1), scores.abroad)
                expected.append([x, y])
    assert [circle[:2] for circle in circles] == pytest.approx(np.array(expected), abs=0.1)

    boxes = []
    for text in labels:
        half = 0.58 * font_size * len(text.text) / 2  # Helvetica's letters are narrower on average
        x = float(text.attrib["x"])
        y = float(text.attrib["y"])
        boxes.append((x - half, y - 0.75 * font_size, x + half, y + 0.22 * font_size))
        assert 0 < x - half and x + half < width and 0 < y < height
    for first, second in itertools.combinations(boxes, 2):
        apart = first[2] <= second[0] or second[2] <= first[0] or first[3] <= second[1] or second[3] <= first[1]
        assert apart, (first, second)
    # Circles, and places along the arrows.
    marks = list(circles)
    for path in root.iterfind("svg:path", SVG):
        if "arrow" in path.attrib["class"]:
            start_x, start_y, end_x, end_y = map(float, re.findall(r"[\d.]+", path.attrib["d"]))
            for share in np.linspace(0, 1, 101):
                marks.append([start_x + share * (end_x - start_x), start_y + share * (end_y - start_y), 1])
    for left, top, right, bottom in boxes:
        for x, y, radius in marks:
            nearest = (min(max(x, left), right), min(max(y, top), bottom))
            assert math.dist((x, y), nearest) > radius


def contrast(one, other):
    """Contrast of two colours, as WCAG 2 defines it."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


def test_the_figure_is_readable_in_light_and_dark_mode():
    style = (ROOT / "docs" / "home_and_abroad.svg").read_text().partition("<style>")[2].partition("</style>")[0]
    light, query, dark = style.partition("@media (prefers-color-scheme: dark)")
    assert query
    for mode in (light, dark):
        colours = dict(re.findall(r"(?:^|} )(\.?\w+) { fill: (#\w{6})", mode, re.MULTILINE))
        assert set(colours) == {".back", "text", ".perada", ".other"}
        for name in ("text", ".perada", ".other"):
            assert contrast(colours[name], colours[".back"]) > 4.5, name


@pytest.fixture(scope="module")
def pictures():
    """The script of the pictures of scanners, corruptions, deployments and rounds."""
    return runpy.run_path(str(ROOT / "docs" / "pictures.py"))


@pytest.mark.parametrize("name", ["deployment.svg", "round.svg"])
def test_diagrams_are_drawn_by_their_script(pictures, name):
    assert (ROOT / "docs" / name).read_text() == pictures["PICTURES"][name]()


def embedded_images(name):
    """Names of the images in a picture, with their pixels."""
    root = ElementTree.parse(ROOT / "docs" / name).getroot()
    results = {}
    pixels = None
    for element in root:
        if element.tag.endswith("image"):
            data = base64.b64decode(element.attrib["href"].removeprefix("data:image/png;base64,"))
            pixels = np.asarray(Image.open(io.BytesIO(data)))
            label = ""
        elif element.tag.endswith("text") and pixels is not None:
            label += element.text
            results[label] = pixels
    return {label: image for label, image in results.items() if not label.endswith("_")}


def test_the_picture_of_scanners_shows_what_each_does_to_a_digit(pictures):
    images = embedded_images("scanners.svg")
    assert list(images) == list(DEVICES)
    for name, image in pictures["scanned_images"]().items():
        assert np.array_equal(images[name], image[0].numpy())
    plain = images["plain"]
    assert np.array_equal(images["negative"], 255 - plain)
    assert np.array_equal(images["turned"], np.rot90(plain))
    assert np.array_equal(images["mirrored"], plain[:, ::-1])
    assert np.array_equal(images["upside_down_negative"], 255 - plain[::-1, ::-1])
    assert np.array_equal(images["faint"], plain // 5 + 102)
    assert np.std(images["noisy"].astype(float) - plain) > 30


@pytest.mark.slow
def test_the_picture_of_corruptions_has_every_kind_with_the_severity_that_its_page_names():
    images = embedded_images("corruptions.svg")
    assert list(images) == ["unchanged", *GROUPS["all"]]
    unchanged = torch.from_numpy(images["unchanged"].copy())[None]
    (severity,) = re.findall(
        r"corruption with severity (\d)\]\(corruptions.svg\)", (ROOT / "docs" / "shifts.md").read_text()
    )
    for kind in GROUPS["all"]:
        expected = corrupt(unchanged, kind, int(severity), seed=0)[0].numpy()
        # Another version of OpenCV or Pillow may round differently.
        assert np.abs(images[kind].astype(float) - expected).mean() < 2, kind


@pytest.mark.parametrize("name", ["deployment.svg", "round.svg", "scanners.svg", "corruptions.svg"])
def test_pictures_are_readable_on_a_phone_and_in_both_modes(name):
    text = (ROOT / "docs" / name).read_text()
    root = ElementTree.fromstring(text)
    width = float(root.attrib["viewBox"].split()[2])
    font_size = float(root.attrib["font-size"])
    assert font_size * 340 / width > 11
    for label in root.iterfind("svg:text", SVG):
        extent = 0.58 * font_size * len(label.text)
        x = float(label.attrib["x"])
        left = x if label.attrib["text-anchor"] == "start" else x - extent / 2
        assert left >= -4 and left + extent <= width + 4, label.text
    light, query, dark = (
        text.partition("<style>")[2].partition("</style>")[0].partition("@media (prefers-color-scheme: dark)")
    )
    assert query
    for mode in (light, dark):
        colours = dict(re.findall(r"(\.?\w+) { fill: (#\w{6})", mode))
        for written in ("text", ".label"):
            assert contrast(colours[written], colours[".back"]) > 4.5
        assert contrast(colours["text"], colours[".box"]) > 4.5


def test_a_label_without_room_is_an_error():
    drawing = figure_script()
    methods = drawing["read_table"]((ROOT / "README.md").read_text())
    crowded = {f"{method}{number}": values for number in range(3) for method, values in methods.items()}
    with pytest.raises(ValueError, match="no room"):
        drawing["draw_figure"](crowded)


@pytest.mark.slow
def test_the_blocks_on_privacy_run(reader):
    names = reader.follow("docs/privacy.md")
    (source,) = [block.code for block in blocks("docs/privacy.md") if "mean_epsilon" in block.code]
    for name in ("server", "release", "equal"):
        said = re.search(rf"^# (.*)\n{name} = ", source, flags=re.MULTILINE)
        assert said is not None
        assert [f"{value:.2f}" for value in names[name]] == said[1].split(", ")
    ledgers = names["ledgers"]
    delta = names["delta"]
    assert 2.9 < ledgers.release.epsilon(0, delta) <= 3.0
    assert ledgers.server.epsilon(0, delta) < 2.5
    assert len(names["run"].info["privacy"]["sample"]["release"]) == 10
    assert (reader.folder / "hospital_adapters" / "client_9" / "README.md").is_file()
    measured = {name for row in names["run"].metrics["rounds"] for name in row if "/" in name}
    assert "privacy/release_epsilon_max" in measured
    assert measured <= metrics_of_the_glossary()


def test_commands_in_sentences_exist(reader):
    for page in PAGES:
        text = (ROOT / page).read_text()
        for names in re.findall(r"`python -m benchmarks ([a-z_ ]+)`", text):
            assert set(names.split()) <= {*BENCHMARKS, "faults", "peers"}, page
        for target in re.findall(r"`make ([a-z-]+)`", text):
            reader.make([target], parse_only=True)


MOST_WORDS = 42_000
"""Words by hand that all pages of the documentation may have together. Whoever adds a page shortens another."""


def words_by_hand(text):
    """Count the words of a page that somebody wrote: letters only, two or more, those of tables included.

    Generated tables, rows of figures, which commands print, blocks of code, comments, addresses of links and code in
    sentences do not count.
    """
    for skipped in (
        r"<!-- generated.*?<!-- /generated -->",
        r"```.*?```",
        r"<!--.*?-->",
        r"(?<=\])\([^)]*\)",
        r"`[^`]*`",
    ):
        text = re.sub(skipped, "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not is_row_of_figures(line)]
    return len(re.findall(r"[A-Za-z]{2,}", "\n".join(lines)))


def is_row_of_figures(line):
    """Return whether a line is the row of a table of which two cells or more begin with a number."""
    cells = line.split("|")[1:-1]
    return sum(re.match(r"[ *−-]*\d", cell) is not None for cell in cells) >= 2


def test_words_by_hand_leave_out_code_and_what_is_generated():
    page = """# Two words

One [link](address.md#anchor) and `some code`, 12 times.

<!-- test: parse only, since it is an example -->
```shell
perada fit
```

| a cell | b |
|---|---|
| of figures | **−0.5 MB** | 12 ± 3 |

<!-- generated: python -m tests.doc_tables rules -->
| name | class |
<!-- /generated -->
"""
    assert words_by_hand(page) == len(["Two", "words", "One", "link", "and", "times", "cell"])


def test_the_pages_have_at_most_42_000_words():
    pages = [page for page in PAGES if page.startswith("docs/") and not page.startswith(("docs/api.md", "docs/api/"))]
    counts = {page: words_by_hand((ROOT / page).read_text(encoding="utf-8")) for page in pages}
    longest = sorted(counts, key=counts.get, reverse=True)[:5]
    assert sum(counts.values()) <= MOST_WORDS, f"take out what is said twice; the longest pages are {longest}"
