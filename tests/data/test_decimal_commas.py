# SPDX-License-Identifier: Apache-2.0
"""Numbers with decimal commas are those that pandas reads with ``decimal=","``."""

import pandas as pd
import pytest
from PIL import Image

from perada.cli import main
from perada.data import ImageTable

AGES = ["20,5", "7", "-3,25", ",5", "1e2", "4,"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(len(AGES)):
        Image.new("RGB", (6, 6), (number, 0, 0)).save(f"{number}.png")
    return tmp_path


def write_table(ages, name="table.csv", column="age"):
    rows = [f"{number}.png;{age};north" for number, age in enumerate(ages)]
    with open(name, "w") as file:
        file.write("\n".join([f"path;{column};client", *rows]))


def test_decimal_commas_are_read_as_by_pandas(folder):
    write_table(AGES)
    numbers = ImageTable("table.csv", numbers="age", decimal=",").read_manifest().numbers
    expected = pd.read_csv("table.csv", sep=";", decimal=",")["age"]
    assert numbers[:, 0].tolist() == expected.astype("float32").tolist()


@pytest.mark.parametrize("cell", ["1.234,5", "1,234,5", "12.5", "1 234,5", "x", "1,5 a"])
def test_other_numbers_are_rejected_with_their_row(folder, cell):
    write_table([*AGES[:5], cell])
    with pytest.raises(ValueError, match=r"row 7: age.*decimal comma") as raised:
        ImageTable("table.csv", numbers="age", decimal=",").read_manifest()
    assert repr(cell) in str(raised.value)


def test_without_the_option_the_error_names_it(folder):
    write_table(AGES)
    with pytest.raises(ValueError, match=r"'20,5'.*decimal: ','"):
        ImageTable("table.csv", numbers="age").read_manifest()
    write_table(AGES, column="label")
    with pytest.raises(ValueError, match="decimal: ','"):
        _ = ImageTable("table.csv").manifest
    with pytest.raises(ValueError, match="decimal must"):
        ImageTable("table.csv", numbers="age", decimal=";")


@pytest.mark.parametrize("words", [["--decimal", ","], ["--decimal=,"]], ids=str)
def test_the_commands_take_the_option(folder, capsys, words):
    write_table(AGES)
    with pytest.raises(ValueError, match="--decimal ,"):
        main(["init", "--images=table.csv", "--yes"])
    main(["init", "--images=table.csv", "--yes", *words])
    assert '"decimal": ","' in (folder / "recipe.yaml").read_text()
    main(["data", "inspect", "table.csv", "--numbers=age", *words])
    assert "The images can be used" in capsys.readouterr().out
    with pytest.raises(ValueError, match="one of"):
        main(["init", "--images=table.csv", "--yes", "--output=other.yaml", "--decimal=;"])


def test_init_names_labels_with_decimal_commas(folder):
    write_table(AGES, column="label")
    with pytest.raises(ValueError, match=r"'20,5'.*--decimal ,"):
        main(["init", "--images=table.csv", "--yes"])
    main(["init", "--images=table.csv", "--yes", "--decimal=,"])
    assert "Regression" in (folder / "recipe.yaml").read_text()
