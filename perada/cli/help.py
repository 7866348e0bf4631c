# SPDX-License-Identifier: Apache-2.0
"""What `--help` says of the commands that run recipes: the options that most need first, and little of Lightning's."""

import shutil
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterable, Sequence
from textwrap import wrap

from perada.algorithms import ALGORITHMS
from perada.cli.keys import SHORT
from perada.cli.messages import subclasses
from perada.data import ImageSet, Partition
from perada.server import SERVER_RULES

FIRST = (
    "config trainer.max_epochs model.backbone model.pretrained model.adapter data.dataset data.partition data.public "
    "data.image_size data.batch_size federated.algorithm federated.clients_per_round federated.local_epochs "
    "federated.local_steps model.lr_personal model.lr_local federated.distillation privacy client_privacy "
    "trainer.check_val_every_n_epoch trainer.accelerator trainer.devices trainer.precision trainer.default_root_dir "
    "seed_everything ckpt_path print_config"
).split()
"""The options that are shown first."""
LIGHTNING = {
    "trainer.max_epochs": "Communication rounds.",
    "trainer.check_val_every_n_epoch": "Rounds between two evaluations.",
    "trainer.accelerator": "auto, cpu, cuda or mps.",
    "trainer.devices": "Devices, which share the clients of a round.",
    "trainer.num_nodes": "Machines.",
    "trainer.precision": "32-true, bf16-mixed or 16-mixed.",
    "trainer.default_root_dir": "Folder in which lightning_logs is made; by default the current one.",
    "trainer.logger": "false for no run folder; or loggers by class, such as TensorBoardLogger.",
    "trainer.callbacks": "Callbacks by class, of Lightning or your own.",
    "trainer.enable_progress_bar": "Bars in a terminal, elsewhere a line for each round; or neither.",
    "trainer.enable_checkpointing": "Save the newest round.",
    "trainer.fast_dev_run": "Try a recipe: one local step, and nothing is written.",
    "trainer.deterministic": "Refuse operations that are not deterministic on a GPU.",
    "trainer.profiler": "simple, advanced or pytorch.",
    "config": "Recipe: its name (`perada ls`) or a file; several are laid over one another, the last on top.",
    "print_config": "Print the whole configuration, and run nothing.",
    "seed_everything": "Seed of all that is random in training.",
    "ckpt_path": "Checkpoint to resume from, or last for the newest.",
}
"""What Lightning's options are for here; its others are shown by ``--help=all`` alone."""
_CLASSES: dict[str, type] = {"data.dataset": ImageSet, "data.public": ImageSet, "data.partition": Partition}
_NAMES = {"federated.algorithm": [*ALGORITHMS], "federated.server_rule": [*SERVER_RULES]}
_GROUPS = {
    "Model": "model.",
    "Data": "data.",
    "Rounds": "federated.",
    "Trainer": "trainer.",
}
END = """\
Both names of an option can be used, on the command line and in recipes. NAME.CHILD sets an argument of a class:
--data.partition.alpha=0.1, --privacy.target_epsilon=3.
  --help WORD                the options with that word in their names, such as --help lr
  --help all                 every option, also those of Lightning's trainer that are seldom needed
  --data.partition.help NAME the arguments of a class, likewise for all options that take one"""


def explained(parser: ArgumentParser, asked: str) -> str:
    """The help of a parser: ``all``, what has a word in its name, or, where nothing is asked for, what most need.

    Raises:
        ValueError: If no option has that word in its name.
    """
    if asked == "all":
        return parser.format_help()
    known = {action.dest: action for action in parser._actions if action.help != SUPPRESS}
    known = {name: action for name, action in known.items() if _is_option(action)}
    if asked:
        found = [action for name, action in known.items() if asked in " ".join(_names(action))]
        if not found:
            raise ValueError(f"--help {asked}: no option has that in its name; --help all shows every option")
        return "\n".join(_lines(found))
    command = parser.prog.split()[-1]
    blocks = [f"usage: perada {command} --config RECIPE [--OPTION VALUE ...]", "-h, --help [WORD | all]"]
    first = [known.pop(name) for name in FIRST if name in known]
    blocks.append("\n".join(["Most used:", *_lines(first)]))
    for title, section in _GROUPS.items():
        own = [action for name, action in known.items() if name.startswith(section)]
        own = [action for action in own if section != "trainer." or action.dest in LIGHTNING]
        blocks.append("\n".join([f"{title}:", *_lines(own)]))
    return "\n\n".join([*blocks, END])


def _is_option(action: Action) -> bool:
    """Whether it sets something; links between options and the help of classes do not, and data.data is for Python."""
    sets = bool(action.option_strings) and action.option_strings[0].startswith("-")
    return sets and not action.dest.endswith(".help") and action.dest != "data.data"


def _names(action: Action) -> list[str]:
    """The names of an option, the short one first."""
    short = [f"--{name}" for name, full in SHORT.items() if full == action.dest]
    own = [name for name in action.option_strings if not name.endswith("+")]
    return [*short, *(name for name in own if name not in short)]


def _lines(actions: Iterable[Action]) -> list[str]:
    """Each option with its names, what it is, its values and its default."""
    out: list[str] = []
    width = min(shutil.get_terminal_size().columns, 120) - 2
    for action in actions:
        choice = action.metavar if isinstance(action.metavar, str) and action.metavar.startswith("{") else ""
        out.append(f"  {', '.join(_names(action))} {choice}".rstrip())
        said = LIGHTNING.get(action.dest) or " ".join((action.help or "").replace("``", "").split())
        if values := _values(action.dest):
            said += f" One of {', '.join(values)}, or a class of your own."
        if action.default not in (None, SUPPRESS, ""):
            said += f" (default: {action.default})"
        out += wrap(said, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return out


def _values(name: str) -> Sequence[str]:
    """The classes or names that an option takes."""
    if name in _CLASSES:
        found = {kind.__name__ for kind in subclasses(_CLASSES[name]) if kind.__module__.startswith("perada.")}
        return sorted(found)
    return _NAMES.get(name, [])
