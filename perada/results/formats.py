# SPDX-License-Identifier: Apache-2.0
"""One model of a run as a file that other programs read, checked against the run's own logits."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim

from perada.core.checks import check_choice, installed
from perada.data.sets.arrays import Photographs
from perada.results.cards import privacy_card, rendered
from perada.results.clients import joined_clients
from perada.results.models import Ensemble
from perada.results.run import Run
from perada.results.run_file import together

Format = Literal["onnx", "safetensors", "torch-export"]
FILES: dict[Format, str] = {"onnx": "model.onnx", "safetensors": "model.safetensors", "torch-export": "model.pt2"}
TOLERANCE = 1e-4
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def export_model(run: Run, client: int | str | None, form: Format, folder: Path) -> str:
    """Write a client's model, or the global one, with its preprocessing, into ``folder``, beside a README.

    Where PEFT can merge an adapter into the backbone's weights, it is merged. The file is read again, and its logits
    on photographs are compared with the run's. Until both files are written, what was in ``folder`` stays.

    Args:
        run: The run.
        client: Number or name of the client; None for the global model.
        form: The format.
        folder: Where the file and the README go.

    Returns:
        What became of the adapter, and how far the logits differ at most.

    Raises:
        ModuleNotFoundError: If a package is missing that the format needs.
        OSError: If the files cannot be written.
        ValueError: If the client does not exist, the model cannot be exported, or the file gives other logits.
    """
    check_choice("format", form, list(FILES))
    for name in _NEEDED if form == "onnx" else ():
        installed(name, "format=onnx", "onnx")
    number = None if client is None else run.number(client)
    own = run.global_model() if number is None else run.personal(number)
    x = _samples(run)
    model, merged = _merged(run, own, number)
    model.requires_grad_(False)
    metadata = {
        "preprocessing": json.dumps(run.preprocessing.record()),
        "classes": json.dumps(run.info.get("classes")),
        "client": json.dumps(client),
        "backbone": json.dumps(run.info["backbone"]),
    }
    write = {"onnx": _onnx, "safetensors": _safetensors, "torch-export": _torch_export}
    with torch.no_grad(), together(folder) as stage:
        expected = own(x)
        try:
            found = write[form](model, x, stage / FILES[form], metadata)(x)
        except OSError:  # the disk's, whatever the format
            raise
        except Exception as error:  # what exporters raise has no common type
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(
                f"the model cannot be written as {form} ({reason}); choose another format, or Run.save"
            ) from error
        difference = float((found - expected).abs().max())
        if not difference <= TOLERANCE:
            raise ValueError(
                f"{str(folder / FILES[form])!r} would give logits that differ by {difference:.1e} from the run's, more "
                f"than {TOLERANCE}, and is not written; choose another format"
            )
        said = f"{merged} Its logits on {len(x)} samples differ by {difference:.1e} at most from the run's."
        text = rendered(
            "model",
            form=form,
            client=client,
            info=run.info,
            shape=run.preprocessing.shape,
            said=said,
            prepared=json.dumps(run.preprocessing.record() | {"classes": run.info.get("classes")}, indent=2),
            privacy=privacy_card(
                run.info.get("privacy"), number if number in run.own_clients() else None, joined_clients(run.info)
            ),
        )
        (stage / "README.md").write_text(f"{text}\n", encoding="utf-8")
    return said


def _samples(run: Run) -> Tensor:
    """Eight cut-outs of scikit-learn's photographs, prepared; noise where the run's images came prepared."""
    preprocessing = run.preprocessing
    if preprocessing.kind == "uint8" and preprocessing.channels in (1, 3):
        photographs = Photographs(8, size=64, gray=preprocessing.channels == 1).images
        assert photographs is not None
        return preprocessing.batch(list(photographs))
    if preprocessing.kind == "tokens":
        raise ValueError("a run on texts cannot be exported so; its adapters can, by Run.save")
    return torch.randn(8, *preprocessing.shape, generator=torch.Generator().manual_seed(0))


def _merged(run: Run, own: nn.Module, client: int | None) -> tuple[nn.Module, str]:
    """The model with its adapter merged where PEFT can, and a sentence that says so."""
    if isinstance(own, Ensemble):
        return own, "It averages several models, whose adapters are kept as layers."
    try:
        return run.merged(client), "The adapter is merged: the model has the layers and names of the plain backbone."
    except (NotImplementedError, ValueError, RuntimeError, AttributeError):  # what PEFT raises depends on the method
        return own, "The adapter is kept as layers of the model: it cannot be merged into the backbone's weights."


def _safetensors(model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]) -> Callable[[Tensor], Tensor]:
    tensors = {name: value.cpu().clone().contiguous() for name, value in model.state_dict().items()}
    path.write_bytes(save(tensors, metadata))
    read = copy.deepcopy(model)
    for value in read.state_dict().values():
        value.zero_()
    with safe_open(path, framework="pt") as file:
        read.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    return read


def _torch_export(model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]) -> Callable[[Tensor], Tensor]:
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch")},))
    torch.export.save(exported, path, extra_files={"metadata.json": json.dumps(metadata)})
    read: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return read


def _onnx(model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own workings
        program: Any = torch.onnx.export(
            model,
            (x,),
            dynamo=True,
            dynamic_shapes=({0: Dim("batch")},),
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    program.model.metadata_props.update(metadata)
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
