# SPDX-License-Identifier: Apache-2.0
"""``perada study``: what it imports, and its figures."""

import sys

import pytest
from PIL import Image

from perada.cli import entry_point, main
from perada.cli.main import STUDIES
from perada.studies.drawing import new_figure, write


def test_a_study_is_imported_only_when_it_is_run(monkeypatch, tmp_path):
    studies = [f"perada.studies.{name.replace('-', '_')}" for name in STUDIES]
    for name in studies:
        monkeypatch.delitem(sys.modules, name, raising=False)
    main(["study"])
    assert [name for name in studies if name in sys.modules] == []
    with pytest.raises(SystemExit):
        main(["study", next(iter(STUDIES)), "--help"])
    assert [name for name in studies if name in sys.modules] == []
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # so that it ends at once
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        main(["study", next(iter(STUDIES)), "--quick", f"--output={tmp_path / 'out'}"])
    assert [name for name in studies if name in sys.modules] == studies[:1]


@pytest.mark.parametrize(
    ("study", "library"),
    [*((study, "matplotlib") for study in STUDIES), ("local-gd", "sklearn")],
)
def test_a_study_without_a_library_of_its_extra_says_what_to_install(study, library, monkeypatch, tmp_path):
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["perada", "study", study, "--quick", f"--output={tmp_path / 'out'}"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        entry_point()
    message = str(stop.value.code)
    assert message.startswith(f"perada: error: this study needs {library}")
    assert message.endswith("pip install 'perada[studies]'")
    assert not (tmp_path / "out").exists()  # it is said before anything is computed


def test_a_figure_is_saved_in_its_size(tmp_path):
    figure = new_figure(3, 2)
    figure.subplots().plot([0, 1], [0, 1])
    write(tmp_path / "new", "line", "{}", {"line": figure})
    with Image.open(tmp_path / "new" / "line.png") as image:
        assert image.format == "PNG"
        assert image.size == (300, 200)
        low, high = image.convert("L").getextrema()
    assert low < 100 < high  # something is drawn
