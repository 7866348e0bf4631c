# SPDX-License-Identifier: Apache-2.0
"""Export one model of a run to a file for other programs, and compare its logits with the run's."""

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim

from perada.core.checks import check_choice, installed
from perada.core.states import images_dtype
from perada.data.sets.arrays import Photographs
from perada.engine.precision import tolerance_of
from perada.federation.failed_outputs import REMEDY, FailedOutputsError
from perada.federation.scores import finite_outputs
from perada.results.cards import privacy_card, render_template
from perada.results.clients import joined_clients
from perada.results.models import Ensemble
from perada.results.overwriting import check_exported_model
from perada.results.predictors import in_dtype_of
from perada.results.run import Run
from perada.results.run_file import together

Format = Literal["onnx", "safetensors", "torch-export"]
FILES: dict[Format, str] = {"onnx": "model.onnx", "safetensors": "model.safetensors", "torch-export": "model.pt2"}
TOLERANCE = 1e-4
"""Largest difference of logits between the file and the run, relative to the largest logit, in single precision."""
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export_model(run: Run, client: int | str | None, form: Format, folder: Path) -> str:
    """Write a client's model, or the global one, with its preprocessing and a README.

    If PEFT can merge the adapter into the backbone's weights, it is merged. The file is read again, and its logits
    on photographs are compared with the run's. Existing files in ``folder`` are kept until both files are written.

    Args:
        run: The run.
        client: Number or name of the client; None for the global model.
        form: The format.
        folder: Folder of the file and the README.

    Returns:
        A sentence on the adapter, and one on the largest difference of the logits.

    Raises:
        FileExistsError: If a file would be replaced that perada did not write.
        ModuleNotFoundError: If a package of the format is not installed.
        OSError: If the files cannot be written.
        ValueError: If the client does not exist, the model cannot be exported, the logits differ, or they are NaN or
            infinite (a :class:`.FailedOutputsError`).
    """
    check_choice("format", form, list(FILES))
    check_exported_model(folder, FILES[form])
    if form == "onnx":
        for package in _ONNX_PACKAGES:
            installed(package, "format=onnx", "onnx")
    number = None if client is None else run.number(client)
    run_model = run.global_model() if number is None else run.personal(number)
    samples = in_dtype_of(run_model, _samples(run))
    merged = _merge(run, run_model, number)
    merged.model.requires_grad_(False)
    metadata = {
        "preprocessing": json.dumps(run.preprocessing.record()),
        "classes": json.dumps(run.info.get("classes")),
        "task": json.dumps(run.info["task"]),
        "client": json.dumps(client),
        "backbone": json.dumps(run.info["backbone"]),
    }
    with torch.no_grad(), together(folder) as stage:
        expected = run_model(samples)
        num_failed = int((~finite_outputs(expected)).sum())
        if num_failed:
            # No file could be compared with the run.
            raise FailedOutputsError(
                f"{str(folder / FILES[form])!r} was not written, because outputs of "
                f"{'the global model' if client is None else f'the model of client {client!r}'} are NaN or infinite "
                f"for {num_failed} of {len(samples)} samples; {REMEDY}"
            )
        logits = _write_and_read(form, merged.model, samples, stage / FILES[form], metadata)
        difference = float((logits - expected).abs().max())
        # False if the difference is NaN.
        limit = tolerance_of(run_model, TOLERANCE) * float(expected.abs().max())
        is_close = difference <= limit
        if not is_close:
            raise ValueError(
                f"{str(folder / FILES[form])!r} was not written, because its logits would differ from the run's by "
                f"{difference:.1e}, more than {limit:.1e}; choose a different format"
            )
        summary = (
            f"{merged.description} Its logits on {len(samples)} samples differ from the run's by at most "
            f"{difference:.1e}."
        )
        text = _readme(run, client, number, form, summary)
        (stage / "README.md").write_text(f"{text}\n", encoding="utf-8")
    return summary


def _write_and_read(form: Format, model: nn.Module, samples: Tensor, path: Path, metadata: dict[str, str]) -> Tensor:
    """Write a model to a file, and return the logits of the model that is read from it.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the model cannot be exported.
    """
    writers = {"onnx": _write_onnx, "safetensors": _write_safetensors, "torch-export": _write_torch_export}
    try:
        read_model = writers[form](model, samples, path, metadata)
        return read_model(samples)
    except OSError:
        # An error of the disk, which no other format avoids.
        raise
    except Exception as error:  # exporters raise errors without a common type
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"the model cannot be exported as {form} ({reason}); choose a different format, or use Run.save"
        ) from error


def _readme(run: Run, client: int | str | None, number: int | None, form: Format, summary: str) -> str:
    """Return the README of an exported model.

    Args:
        run: The run.
        client: The client, as it was requested; None for the global model.
        number: Number of the client.
        form: The format.
        summary: What is said of the adapter and the logits.
    """
    private_client = number if number in run.own_clients() else None
    preprocessing = run.preprocessing.record() | {"classes": run.info.get("classes")}
    return render_template(
        "model",
        form=form,
        client=client,
        info=run.info,
        shape=run.preprocessing.shape,
        summary=summary,
        prepared=json.dumps(preprocessing, indent=2),
        privacy=privacy_card(run.info.get("privacy"), private_client, joined_clients(run.info)),
    )


def _samples(run: Run) -> Tensor:
    """Return eight prepared crops of scikit-learn's photographs, or noise if the run had prepared images."""
    preprocessing = run.preprocessing
    if preprocessing.kind == "uint8" and preprocessing.channels in (1, 3):
        photographs = Photographs(8, size=64, gray=preprocessing.channels == 1).images
        assert photographs is not None
        return preprocessing.batch(list(photographs))
    if preprocessing.kind == "tokens":
        raise ValueError("a run on texts cannot be exported to this format; save its adapters with Run.save")
    return torch.randn(8, *preprocessing.shape, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class _Merged:
    """A model to export.

    Attributes:
        model: The model, with its adapter merged if possible.
        description: A sentence on the adapter.
    """

    model: nn.Module
    description: str


def _merge(run: Run, run_model: nn.Module, client: int | None) -> _Merged:
    """Merge the adapter of a run's model into the backbone's weights, if PEFT can."""
    if isinstance(run_model, Ensemble):
        return _Merged(run_model, "It averages several models, whose adapters are kept as layers.")
    try:
        model = run.merged(client)
    except (NotImplementedError, ValueError, RuntimeError, AttributeError):  # depends on PEFT's method
        return _Merged(
            run_model,
            "The adapter is kept as layers of the model: it cannot be merged into the backbone's weights.",
        )
    return _Merged(model, "The adapter is merged: the model has the layers and names of the plain backbone.")


# Each of the following functions writes a file and returns the model that it reads from it.


def _write_safetensors(model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]) -> Callable[[Tensor], Tensor]:
    tensors = {name: value.cpu().clone().contiguous() for name, value in model.state_dict().items()}
    path.write_bytes(save(tensors, metadata))
    read_model = copy.deepcopy(model)
    # Set to zero first, so that a tensor that is missing in the file changes the logits.
    for value in read_model.state_dict().values():
        value.zero_()
    with safe_open(path, framework="pt") as file:
        read_model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    return read_model


def _write_torch_export(
    model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]
) -> Callable[[Tensor], Tensor]:
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch")},))
    torch.export.save(exported, path, extra_files={"metadata.json": json.dumps(metadata)})
    read_model: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return read_model


def _write_onnx(model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    if images_dtype(model) == torch.float64:
        # onnxruntime has no convolutions in double precision.
        model = copy.deepcopy(model).float()
        x = x.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter's internals
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
    return lambda images: torch.from_numpy(session.run(None, {"images": images.to(x.dtype).numpy()})[0])
